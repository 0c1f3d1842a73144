"""Checks of one checkpoint: does the model in hand do what its configuration says? One measured number each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from model import GPT
from model.config import SamplingConfig
from model.generate import generate
from probes.capture import LayerCall
from probes.checks.path_check import CheckResult, check_layers, layer_calls


@torch.no_grad()
def check(model: GPT, tokens: Tensor, *, n_valid_tokens: int | None = None) -> list[CheckResult]:
    """All checks on `tokens` (T,) or (1, T) int64, T ≥ 2, cut to block_size; float32 is assumed for the limits.

    n_valid_tokens: ids from here on pad the vocabulary and are not drawn. The model is in eval mode meanwhile.
    ValueError when there are fewer than two tokens.
    """
    tokens = tokens.reshape(1, -1)[:, : model.config.block_size].to(model.token_embedding.weight.device)
    n_valid = model.config.vocab_size if n_valid_tokens is None else n_valid_tokens
    if tokens.shape[1] < 2:
        raise ValueError("a check needs at least two tokens and a block_size of at least two")
    was_training = model.training
    model.eval()
    try:
        calls = layer_calls(model, tokens)
        return [
            causality_by_perturbation(model, tokens, n_valid),
            causality_by_gradient(model, tokens, calls),
            permutation(model, tokens, calls),
            *check_layers(model, calls),
            *decoding(model, tokens, n_valid, calls),
        ]
    finally:
        model.train(was_training)


def causality_by_perturbation(model: GPT, tokens: Tensor, n_valid: int) -> CheckResult:
    """Change token t: no logit before t may move. Without a causal mask they must."""
    name = "change of earlier logits when a token changes"
    limit = "≤ 1e-06" if model.config.causal else "> 0"
    if n_valid < 2:
        return CheckResult(name, True, None, limit, "not measured: the vocabulary has one token")
    n, before = tokens.shape[1], model(tokens)
    largest, detail = 0.0, ""
    for t in sorted({1, n // 2, n - 1}):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + n_valid // 2) % n_valid
        moved = (model(changed) - before)[0, :t].abs().amax(-1).nan_to_num(float("inf"))  # (t,)
        if moved.max() > largest:
            largest, detail = float(moved.max()), f"position {int(moved.argmax())} moved with token {t}"
    passed = largest <= 1e-6 if model.config.causal else largest > 0
    return CheckResult(name, passed, largest, limit, "" if passed else detail)


def causality_by_gradient(model: GPT, tokens: Tensor, calls: list[LayerCall]) -> CheckResult:
    """The gradient of position i with respect to the input at j > i is 0; at j = i it is not."""
    name, limit = "gradient from later tokens", "0" if model.config.causal else "> 0"
    needed = f"backward_{tokens.device.type}"
    for call in calls:
        if needed not in call.path.supports:
            return CheckResult(name, True, None, limit, f"not measured: path {call.path.name} has no {needed}")
    n = tokens.shape[1]
    rows = sorted({0, n // 2 - 1, n - 2})
    direction = torch.randn(model.config.vocab_size, generator=torch.Generator().manual_seed(0)).to(tokens.device)
    kept: list[Tensor] = []

    def cut(_module: Any, _args: Any, out: Tensor) -> Tensor:
        kept.append(out.detach().requires_grad_())
        return kept[-1]

    with torch.enable_grad(), _hooked(model.token_embedding, cut):
        logits = model(tokens)
        sizes = [
            torch.autograd.grad((logits[0, i] * direction).sum(), kept[-1], retain_graph=True)[0][0].abs().amax(-1)
            for i in rows
        ]  # one (T,) a row
    future = max(float(size[i + 1 :].nan_to_num(float("inf")).max()) for i, size in zip(rows, sizes, strict=True))
    own = min(float(size[i]) for i, size in zip(rows, sizes, strict=True))
    detail = "" if own > 0 else "a position's own token has no gradient"
    passed = (future == 0 if model.config.causal else future > 0) and own > 0
    return CheckResult(name, passed, future, limit, detail)


def permutation(model: GPT, tokens: Tensor, calls: list[LayerCall]) -> CheckResult:
    """Shuffle the earlier tokens: without positions the last row of ONE attention layer must stay, with them change.

    (Deeper layers tell the order even without positions: a causal row i is a mean over i + 1 tokens.)
    """
    window = calls[0].path.rule_for(calls[0].rule).window
    tokens = tokens[:, -min(tokens.shape[1], window or tokens.shape[1]) :]
    n = tokens.shape[1]
    order = torch.randperm(n - 1, generator=torch.Generator().manual_seed(1)).to(tokens.device)
    if torch.equal(tokens[0, order], tokens[0, :-1]):
        order = order.roll(1)
    shuffled = torch.cat((tokens[:, :-1][:, order], tokens[:, -1:]), dim=1)
    rows = []

    def keep(_module: Any, _args: Any, out: Tensor) -> None:
        rows.append(out[0, -1])

    with _hooked(model.get_submodule("blocks.0.attn"), keep):
        model(tokens)
        model(shuffled)
    change = float((rows[0] - rows[1]).norm() / rows[0].norm().clamp_min(1e-30))
    position = model.config.position
    position = model.config.position
    name = f"change by shuffling the earlier tokens ({position})"
    if position == "none":
        return CheckResult(name, change <= 2e-6, change, "≤ 2e-06")
    if n < 3 or torch.equal(shuffled, tokens):
        reason = "not measured: needs two different earlier tokens inside the window"
        return CheckResult(name, True, None, "> 2e-06", reason)
    return CheckResult(name, change > 2e-6, change, "> 2e-06")


def decoding(model: GPT, tokens: Tensor, n_valid: int, calls: list[LayerCall]) -> Iterator[CheckResult]:
    """With a cache, a prompt and then one token at a time, the logits are those of the whole pass; and greedy
    decoding writes the same tokens, also past block_size."""
    name = "cached - uncached decoding, largest logit difference"
    if "cache" not in calls[0].path.supports or not model.config.causal:
        reason = f"path {calls[0].path.name} has no cache" if model.config.causal else "the model is not causal"
        yield CheckResult(name, True, None, "≤ 1e-04", f"not measured: {reason}")
        return
    n, cache = tokens.shape[1], model.new_cache()
    whole = model(tokens)[0]  # (T, V)
    prompt = max(1, n // 2)
    steps = [model(tokens[:, :prompt], cache=cache)[0]]
    steps += [model(tokens[:, i : i + 1], cache=cache)[0] for i in range(prompt, n)]
    moved = (torch.cat(steps) - whole).abs().amax(-1).nan_to_num(float("inf"))  # (T,)
    limit = 1e-4 * max(1.0, float(whole.abs().max()))
    passed = bool(moved.max() <= limit)
    first = f"first at position {int((moved > limit).nonzero()[0])}, after a prompt of {prompt}" if not passed else ""
    yield CheckResult(name, passed, float(moved.max()), f"≤ {limit:.0e}", first)

    start = tokens.repeat(1, -(-model.config.block_size // n))[:, : max(1, model.config.block_size - 4)]
    count = 4 + min(12, model.config.block_size)
    options: dict[str, Any] = {"sampling": SamplingConfig(temperature=0), "n_valid_tokens": n_valid}
    cached, uncached = (
        torch.cat(list(generate(model, start, max_new_tokens=count, use_cache=use_cache, **options)))
        for use_cache in (True, False)
    )  # (count,)
    same = cached == uncached
    past = start.shape[1] + count - model.config.block_size
    name = f"greedy tokens changed by a cache, of {count} ({past} past block)"
    detail = "" if bool(same.all()) else f"first at token {int((~same).nonzero()[0])}"
    yield CheckResult(name, not detail, int((~same).sum()), "0", detail)


@contextmanager
def _hooked(module: torch.nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
