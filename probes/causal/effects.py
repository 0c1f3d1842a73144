"""Effects: what an intervention does to the prediction, one part of attention at a time. The model is in eval mode."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model import GPT
from model.attention.path import repeat_groups
from model.gpt import IGNORED, next_token_loss
from probes.causal.interventions import (
    Head,
    How,
    ablate,
    check_softmax,
    knockout,
    patching,
    removing,
    replacements,
    replacing_heads,
    streams,
)
from probes.checks.path_check import layer_calls

_TOKENS_AT_ONCE, _LOGITS_AT_ONCE = 8192, 1 << 26
_LEAST_DIFFERENCE = 1e-3  # logits, between clean and corrupted: what less is divided by is no effect


@torch.no_grad()
def ablation_losses(
    model: GPT,
    tokens: Tensor,
    groups: Sequence[Sequence[Head]],
    *,
    how: How = "zero",
    keep_patterns: bool = False,
    counted: slice = slice(None),
) -> list[float]:
    """Loss in nats a token on `tokens` (n,): of the model as it is, then without each group of heads.

    The text is cut into examples of block_size targets, as in validation; what is left over at its end is not used. A
    shorter text is one example. Tokens (N, T) are N examples. mean: over all of them. counted: which targets of each
    example count, all by default. ValueError for fewer than two tokens and for wrong heads.
    """
    if tokens.shape[-1] < 2:
        raise ValueError(f"a loss needs at least two tokens; the text has {len(tokens)}")
    if tokens.ndim == 1:
        n_targets = min(model.config.block_size, len(tokens) - 1)
        tokens = tokens.unfold(0, n_targets + 1, n_targets)  # (N, T): an example ends where the next one begins
    inputs, every_target = tokens[:, :-1], tokens[:, 1:]
    targets = torch.full_like(every_target, IGNORED)
    targets[:, counted] = every_target[:, counted]
    n_examples, n_tokens = inputs.shape
    n_parts = max(1, min(n_examples // 2, -(-n_examples // _at_once(model, n_tokens))))  # no part of one example only
    parts = list(zip(inputs.tensor_split(n_parts), targets.tensor_split(n_parts), strict=True))
    means = _mean_outputs(model, [x for x, _ in parts]) if how == "mean" else None
    nats = [0.0] * (1 + len(groups))
    for x, y in parts:
        clean = layer_calls(model, x)
        values = means or replacements(how, clean)
        nats[0] += next_token_loss(model(x), y).item() * len(x)
        for place, heads in enumerate(groups, start=1):
            with ablate(model, heads, values, frozen=clean if keep_patterns else ()):
                nats[place] += next_token_loss(model(x), y).item() * len(x)
    return [part / n_examples for part in nats]


def _mean_outputs(model: GPT, parts: Sequence[Tensor]) -> Mapping[int, Tensor]:
    n_examples = sum(map(len, parts))
    means: dict[int, Tensor] = {}
    for x in parts:
        for layer, mean in replacements("mean", layer_calls(model, x)).items():
            means[layer] = means.get(layer, torch.zeros_like(mean)) + mean * (len(x) / n_examples)
    return means


@torch.no_grad()
def knockout_change(
    model: GPT,
    tokens: Tensor,
    edges: Sequence[tuple[int, int]],
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Probabilities (V,) float64 of the token after `tokens` (T,), before and after the edges are knocked out.

    ValueError when the masks of these layers let none of the edges through.
    """
    calls = layer_calls(model, tokens[None])
    with knockout(model, edges, layers, heads=heads):
        after = _next(model(tokens[None]))[0]
    queries, keys = (torch.tensor(part) for part in zip(*edges, strict=True))
    rules = [call.path.rule_for(call.rule) for call in calls if call.layer in layers]
    if not any(rule.allowed(queries, keys).diagonal().any() for rule in rules):
        query, key = edges[0]
        raise ValueError(f"query {query} does not see key {key} in these layers; there is no edge to knock out")
    return _next(model(tokens[None]))[0], after


def divergence(before: Tensor, after: Tensor) -> float:
    """Kullback-Leibler divergence of (V,) from (V,) in nats: Σ before · ln(before / after)."""
    return float((torch.xlogy(before, before) - torch.xlogy(before, after)).sum())


@dataclass(frozen=True)
class EdgeEffects:
    """Of one head and one query: each key that it sees, its weight, and what changes when that edge alone goes.

    output: length of the change of the head's output. distribution: half the sum of the absolute changes of the
    probabilities of the next token.
    """

    layer: int
    head: int
    keys: Tensor  # (K,) int64
    weights: Tensor  # (K,) float64
    output: Tensor  # (K,) float64
    distribution: Tensor  # (K,) float64


@torch.no_grad()
def edge_effects(model: GPT, tokens: Tensor, query: int) -> Iterator[EdgeEffects]:
    """Of every head, the edges of one query of `tokens` (T,); the distribution is the one that follows `query`.

    The output follows in closed form, out' - out = A_j (out - v_j) / (1 - A_j); the distribution needs a run an edge.
    An edge that holds the whole row (1 - A_j < 1e-9) is left out. ValueError for a query that sees one key only, and
    for a path that is no softmax.
    """
    if not 0 <= query < len(tokens):
        raise ValueError(f"query {query} does not exist; the text has {len(tokens)} tokens")
    for layer in range(model.config.n_layer):
        check_softmax(model, layer)
    row = torch.tensor([query], device=tokens.device)
    before = _next(model(tokens[None]), query)
    for call in layer_calls(model, tokens[None]):
        rule = call.path.rule_for(call.rule)
        q, k, v = call.q[:, :, row].double(), call.k.double(), repeat_groups(call.v, call.q.shape[1])[0].double()
        weights = call.path.scores(q, k, rule=rule, rows=row)[0, :, 0].softmax(-1)  # (H, S)
        seen = rule.allowed(row, torch.arange(len(tokens), device=tokens.device)).flatten()
        if seen.sum() < 2:
            raise ValueError(f"query {query} sees one key in layer {call.layer}; no edge of it can go")
        out = weights[:, None] @ v  # (H, 1, D)
        output = weights / (1 - weights) * (out - v).norm(dim=-1)  # (H, S)
        for head in range(len(weights)):
            keys = (seen & (1 - weights[head] >= 1e-9)).nonzero()[:, 0]
            after = torch.cat(list(_without_each(model, tokens, query, call.layer, head, keys)))
            distribution = (after - before).abs().sum(-1) / 2  # (K,)
            yield EdgeEffects(call.layer, head, keys, weights[head, keys], output[head, keys], distribution)


def _without_each(model: GPT, tokens: Tensor, query: int, layer: int, head: int, keys: Tensor) -> Iterator[Tensor]:
    """(some of K, V): the distribution after `query` without the edge to each key; copies of the text run at once."""
    for some in keys.split(_at_once(model, len(tokens))):
        removed = torch.zeros(len(some), model.config.n_head, 1, len(tokens), dtype=torch.bool)
        removed[range(len(some)), head, 0, some.cpu()] = True
        with removing(model, removed, torch.tensor([query]), [layer]):
            yield _next(model(tokens.expand(len(some), -1)), query)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's: the correlation of the ranks of (K,) and (K,), equal values sharing their mean rank. NaN when one of
    them is constant or has fewer than two values."""
    ranks = torch.stack([_ranks(x), _ranks(y)])
    if len(x) < 2 or (ranks.std(-1) == 0).any():
        return float("nan")
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(x: Tensor) -> Tensor:
    _, places, counts = x.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[places]


@dataclass(frozen=True)
class Patches:
    """Scores: 0 where a part of the clean run changes nothing in the corrupted one, 1 where it restores the answer."""

    stream: Tensor  # (L, T): the residual stream that enters a layer, at one position
    heads: Tensor  # (L, H): the output of a head, at all positions
    clean: float  # logit of the answer less that of the other
    corrupted: float


@torch.no_grad()
def patch_scores(model: GPT, clean: Tensor, corrupt: Tensor, answer: int, other: int) -> Patches:
    """(patched - corrupted) / (clean - corrupted) of the logit difference answer - other at the last position.

    clean and corrupt (T,). ValueError for other lengths, and when both texts give the same difference.
    """
    if len(clean) != len(corrupt):
        raise ValueError(
            f"the clean text has {len(clean)} tokens and the corrupted one {len(corrupt)}; make them equal"
        )

    def difference(tokens: Tensor) -> Tensor:
        logits = model(tokens)[:, -1].double()
        return logits[:, answer] - logits[:, other]

    start, end = float(difference(corrupt[None])), float(difference(clean[None]))
    if not abs(end - start) > _LEAST_DIFFERENCE:
        raise ValueError(
            f"both texts give nearly the same logit difference ({start:.4f} corrupted, {end:.4f} clean): there is "
            "nothing to restore; choose texts that differ in what the answer depends on"
        )
    n_layer, n_head, n_tokens = model.config.n_layer, model.config.n_head, len(clean)
    values = {call.layer: call.out for call in layer_calls(model, clean[None])}
    flow, stream, heads = streams(model, clean[None]), [], []
    for layer in range(n_layer):
        for at in torch.eye(n_tokens, dtype=torch.bool).split(_at_once(model, n_tokens)):
            with patching(model, layer, at, flow[layer]):
                stream.append(difference(corrupt.expand(len(at), -1)))
        for chosen in torch.eye(n_head, dtype=torch.bool).split(_at_once(model, n_tokens)):
            with replacing_heads(model, {layer: chosen}, values):
                heads.append(difference(corrupt.expand(len(chosen), -1)))
    scores = [((torch.cat(part) - start) / (end - start)).view(n_layer, -1).cpu() for part in (stream, heads)]
    return Patches(scores[0], scores[1], end, start)


def _next(logits: Tensor, position: int = -1) -> Tensor:
    """(B, T, V) -> the distribution (B, V) in float64 of the token after `position`."""
    return logits[:, position].double().softmax(-1)


def _at_once(model: GPT, n_tokens: int) -> int:
    """How many texts of n_tokens run as one batch."""
    return max(1, min(_TOKENS_AT_ONCE // n_tokens, _LOGITS_AT_ONCE // (n_tokens * model.config.vocab_size)))
