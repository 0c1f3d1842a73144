"""Checks of each layer's attention path: its mask, its scale, its row sums, and its agreement with the reference.

The path is asked by calling it. With values that are the columns of the identity its output IS its weights:
out = A @ I. So what is measured is what the kernel does, not what it says about itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model import GPT
from model.attention import build
from model.attention.mask import MaskRule
from model.attention.path import alibi_slopes
from probes.capture import LayerCall, watching
from probes.record import allowed_pairs

_MASK_TOKENS = 48  # more when a window is longer


@dataclass(frozen=True)
class CheckResult:
    """One line of a report. `measured` is the number that had to keep `limit`, None when it was not measured;
    `detail` says why not, or where it went wrong."""

    name: str
    passed: bool
    measured: float | None
    limit: str
    detail: str = ""


def layer_calls(model: GPT, tokens: Tensor) -> list[LayerCall]:
    """What every layer's path is called with on `tokens` (1, T)."""
    calls: list[LayerCall] = []
    with watching(model, range(model.config.n_layer), calls.append):
        model(tokens)
    return calls


def check_layers(model: GPT, calls: list[LayerCall]) -> Iterator[CheckResult]:
    """One result a check, over all layers; `detail` names the layers that fail."""
    yield _mask(model, calls)
    yield _row_sums(calls)
    calls = [call for call in calls if "log_sum_exp" in call.path.supports]  # what follows is about the softmax
    if calls:
        yield _log_sum_exp(model, calls)
        if model.config.attention_softcap == 0:
            yield _scale(model, calls)
        yield _reference(model, calls)


def kernel_weights(call: LayerCall, q: Tensor, k: Tensor) -> Tensor:
    """The map that the path's forward really applies: q (1, H, T, D), k (1, G, T, D) -> (H, T, T)."""
    n, dim = k.shape[2], k.shape[3]
    identity = torch.eye(n, dtype=q.dtype, device=q.device)
    parts = []
    for start in range(0, n, dim):
        columns = identity[:, start : start + dim]
        v = torch.zeros_like(k)
        v[..., : columns.shape[1]] = columns
        parts.append(call.path(q, k, v, rule=call.rule)[0, :, :, : columns.shape[1]])
    return torch.cat(parts, dim=-1)


def _expected_rule(model: GPT, call: LayerCall) -> MaskRule:
    """From the configuration and the path's own narrowing; not from what the layer was given."""
    config = model.config
    is_windowed = config.window > 0 and "window" in call.path.supports
    window, n_global = (config.window, config.n_global) if is_windowed else (None, 0)
    return call.path.rule_for(MaskRule(causal=config.causal, window=window, n_global=n_global))


def _mask(model: GPT, calls: list[LayerCall]) -> CheckResult:
    """Which pairs carry weight, against which may. Names layer, offset j - i and the first pair of each error."""
    errors, n_pairs, n_wrong = [], 0, 0
    for call in calls:
        rule = _expected_rule(model, call)
        # A window that no context reaches the end of is no different from none.
        n = max(_MASK_TOKENS, min((rule.window or 0) + rule.n_global + 8, model.config.block_size))
        # Mild random scores: trained ones may round an allowed weight to zero.
        q, k = _random_like(call.q, n, seed=0), _random_like(call.k, n, seed=1)
        weights = kernel_weights(call, q, k)  # (H, N, N)
        allowed = allowed_pairs(rule, torch.arange(n), torch.arange(n)).to(weights.device)
        leaks = ((weights > 1e-7).any(0)) & ~allowed
        missing = ~(weights > 0).all(0) & allowed  # NaN is missing too
        n_pairs += allowed.numel()
        n_wrong += int((leaks | missing).sum())
        errors += _name_errors(call.layer, leaks, "sees forbidden")
        errors += _name_errors(call.layer, missing, "misses allowed")
    name = f"wrong pairs in the masks, of {n_pairs} in {len(calls)} layers"
    return CheckResult(name, not errors, n_wrong, "0", "; ".join(errors))


def _name_errors(layer: int, wrong: Tensor, what: str) -> list[str]:
    pairs = wrong.nonzero()  # (P, 2) of query, key
    offsets = sorted({int(j - i) for i, j in pairs}, key=abs)
    if not offsets:
        return []
    i, j = next((int(i), int(j)) for i, j in pairs if int(j - i) == offsets[0])
    shown = ", ".join(f"{offset:+d}" for offset in offsets[:3]) + (f" … {offsets[-1]:+d}" if len(offsets) > 3 else "")
    return [f"layer {layer} {what} keys at offset {shown} (query {i}, key {j})"]


def _row_sums(calls: list[LayerCall]) -> CheckResult:
    """With all values 1 every output must be 1: the kernel's own weights sum to one."""
    deviations = [(call.path(call.q, call.k, torch.ones_like(call.v), rule=call.rule) - 1).abs() for call in calls]
    return _worst("row sums of the kernel, off 1", calls, deviations, 1e-5)


def _log_sum_exp(model: GPT, calls: list[LayerCall]) -> CheckResult:
    """sum_j exp(score_ij - lse_i) must be 1, with scores and mask from the configuration."""
    deviations = []
    for call in calls:
        scores = _float64_scores(model, call, call.q, call.k)  # (H, T, T)
        lse = call.path.log_sum_exp(call.q, call.k, rule=call.rule)[0].double()  # (H, T)
        deviations.append((torch.exp(scores - lse[:, :, None]).sum(-1) - 1).abs()[None, :, :, None])
    return _worst("row sums from log-sum-exp, off 1", calls, deviations, 1e-4)


def _scale(model: GPT, calls: list[LayerCall]) -> CheckResult:
    """log A[i, j] - log A[i, j'] = scale·(q_i·k_j - q_i·k_j'): the last row's slope is the factor on q·k."""
    worst, wrong = 0.0, []
    expected = model.config.head_dim**-0.5
    for call in calls:
        n = min(16, _expected_rule(model, call).window or 16)
        if n < 2:
            continue
        q, k = _random_like(call.q, n, seed=0), _random_like(call.k, n, seed=1)
        logs = kernel_weights(call, q, k)[:, -1].double().log()  # (H, N)
        if model.config.position == "alibi":
            slopes = alibi_slopes(q.shape[1], torch.float64, q.device)
            logs = logs + slopes[:, None] * torch.arange(n - 1, -1, -1, device=q.device)
        products = _products(q, k)[:, -1]  # (H, N)
        logs, products = logs - logs.mean(-1, keepdim=True), products - products.mean(-1, keepdim=True)
        measured = float((logs * products).sum() / products.square().sum())
        error = abs(measured / expected - 1)
        if not error <= 1e-3:
            wrong.append(f"layer {call.layer} has {measured:.5f}")
        worst = max(worst, error)
    detail = f"{'; '.join(wrong)}; expected {expected:.5f}" if wrong else ""
    return CheckResult("scale of the scores, relative error", not wrong, worst, "≤ 1e-03", detail)


def _reference(model: GPT, calls: list[LayerCall]) -> CheckResult:
    """The same q, k, v along the reference path, built from the configuration."""
    config = model.config
    reference = build("reference", softcap=config.attention_softcap, alibi=config.position == "alibi")
    deviations = []
    for call in calls:
        out = reference(call.q, call.k, call.v, rule=_expected_rule(model, call))
        deviations.append((out - call.out).abs() / call.v.abs().max().clamp_min(1.0))
    return _worst(f"{calls[0].path.name} - reference, largest difference", calls, deviations, 1e-5)


def _worst(name: str, calls: list[LayerCall], deviations: list[Tensor], limit: float) -> CheckResult:
    """deviations: (1, H, T, D) a layer. Names layer, head and row of the largest in each layer that fails."""
    largest = [deviation[0].amax(-1).nan_to_num(float("inf")) for deviation in deviations]  # (H, T) a layer
    wrong = []
    for call, deviation in zip(calls, largest, strict=True):
        if deviation.max() > limit:
            head, row = divmod(int(deviation.argmax()), deviation.shape[1])
            wrong.append(f"layer {call.layer} head {head} row {row}: {float(deviation.max()):.1e}")
    worst = max(float(deviation.max()) for deviation in largest)
    return CheckResult(name, not wrong, worst, f"≤ {limit:.0e}", "; ".join(wrong))


def _float64_scores(model: GPT, call: LayerCall, q: Tensor, k: Tensor) -> Tensor:
    """(H, T, T): written out once more, from the configuration alone; -inf where the mask forbids."""
    scores = _products(q, k) * model.config.head_dim**-0.5
    cap = model.config.attention_softcap
    scores = cap * torch.tanh(scores / cap) if cap > 0 else scores
    places = torch.arange(q.shape[2], device=q.device)
    if model.config.position == "alibi":
        distance = (places[:, None] - places[None, :]).abs()
        scores = scores - alibi_slopes(q.shape[1], torch.float64, q.device)[:, None, None] * distance
    allowed = allowed_pairs(_expected_rule(model, call), places, places)
    return scores.masked_fill(~allowed, float("-inf"))


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q·k in float64, (H, T, S): key-value head g serves the H/G query heads from g·H/G on."""
    group = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
    return q[0].double() @ k[0].double()[group].mT


def _random_like(x: Tensor, n: int, seed: int) -> Tensor:
    """Normal numbers (1, heads of x, n, D) in the dtype and on the device of x."""
    numbers = torch.randn(1, x.shape[1], n, x.shape[3], generator=torch.Generator().manual_seed(seed))
    return numbers.to(x)
