"""Interventions: while one lasts, the model runs with a part of attention changed.

All are forward hooks: on the attention paths, which give the output per head, and on the blocks, which take the
residual stream. So they work on whatever path the model has, and nothing of the model is changed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from model import GPT
from model.attention.path import repeat_groups
from probes.capture import LayerCall, watching
from probes.metadata import choices

Head = tuple[int, int]  # layer, head
How = Literal["zero", "mean", "resample"]


@contextmanager
def ablate(
    model: GPT, heads: Sequence[Head], values: Mapping[int, Tensor], *, frozen: Sequence[LayerCall] = ()
) -> Iterator[None]:
    """The output of each of these heads is the value of its layer, broadcast to (B, H, T, D); see `replacements`.

    frozen: the calls of all layers in an unchanged run on the same tokens. Later layers then keep the maps of that run:
    only their values, not their queries and keys, feel what was changed. ValueError for a head that is not there.
    """
    check_heads(model, heads)
    chosen = {layer: torch.zeros(1, model.config.n_head, dtype=torch.bool) for layer, _ in heads}
    for layer, head in heads:
        chosen[layer][0, head] = True
    with replacing_heads(model, chosen, values, frozen=frozen):
        yield


@contextmanager
def replacing_heads(
    model: GPT, chosen: Mapping[int, Tensor], values: Mapping[int, Tensor], *, frozen: Sequence[LayerCall] = ()
) -> Iterator[None]:
    """As `ablate`; chosen: of each layer booleans (B or 1, H), so that every row of a batch can lose another head."""
    first = min(chosen, default=model.config.n_layer)
    clean = {call.layer: call for call in frozen if call.layer > first}

    def edit(call: LayerCall) -> Tensor:
        out = call.out
        if call.layer in clean:
            q, k = clean[call.layer].q, clean[call.layer].k
            out = call.path.forward(q, k, call.v, rule=call.rule)  # not a call: it would be edited again
        if call.layer in chosen:
            here = chosen[call.layer][:, :, None, None].to(out.device)
            out = torch.where(here, values[call.layer], out)
        return out

    with watching(model, sorted({*chosen, *clean}), edit):
        yield


def replacements(how: How, calls: Iterable[LayerCall]) -> dict[int, Tensor]:
    """What the heads of each layer are replaced by, from the calls of an unchanged run.

    zero      nothing, (1, H, 1, D).
    mean      each head's mean output over the examples and positions, (1, H, 1, D).
    resample  the output on the example before, at the same position, (B, H, T, D). ValueError for a single example.
    """
    if how == "zero":
        return {call.layer: torch.zeros_like(call.out[:1, :, :1]) for call in calls}
    if how == "mean":
        return {call.layer: call.out.mean((0, 2), keepdim=True) for call in calls}
    values = {call.layer: call.out.roll(1, dims=0) for call in calls}
    if any(len(value) < 2 for value in values.values()):
        raise ValueError("resample takes another example's output, and there is one example; give a longer text")
    return values


@contextmanager
def knockout(
    model: GPT, edges: Sequence[tuple[int, int]], layers: Iterable[int], *, heads: Sequence[int] | None = None
) -> Iterator[None]:
    """Forbids pairs (query, key) in these layers, in all heads or some; their rows renormalise (Geva et al. 2023).

    ValueError for positions, layers or heads that are not there, for a path that is no softmax, and for a query that
    would be left without a key. Pairs that the mask forbids anyway change nothing.
    """
    rows = torch.tensor(sorted({query for query, _ in edges}), dtype=torch.long)
    removed = torch.zeros(1, model.config.n_head, len(rows), 1 + max((key for _, key in edges), default=0)).bool()
    check_heads(model, [(0, head) for head in heads or ()])
    chosen = slice(None) if heads is None else list(heads)
    for query, key in edges:
        if query < 0 or key < 0:
            raise ValueError(f"position {min(query, key)} does not exist; they count from 0")
        removed[:, chosen, int(torch.searchsorted(rows, query)), key] = True
    with removing(model, removed, rows, layers):
        yield


@contextmanager
def removing(model: GPT, removed: Tensor, rows: Tensor, layers: Iterable[int]) -> Iterator[None]:
    """As `knockout`; removed: booleans (B or 1, H, R, up to S) for the R queries at `rows`, so that every row of a
    batch can lose other edges. O(B·H·R·S) memory."""
    layers = sorted(set(layers))
    check_heads(model, [(layer, 0) for layer in layers])
    for layer in layers:
        check_softmax(model, layer)
    with watching(model, layers, lambda call: _without(call, removed, rows)):
        yield


def _without(call: LayerCall, removed: Tensor, rows: Tensor) -> Tensor:
    """The output without the removed edges: out_i = Σ A_ij v_j / Σ A_ij over the keys j that are left, (B, H, T, D).

    For one edge that is (out_i - A_ij v_j) / (1 - A_ij); summing what is left has no cancellation when A_ij is near 1.
    """
    n_keys, device = call.k.shape[2], call.q.device
    if len(rows) == 0:
        return call.out
    largest = max(int(rows.max()), removed.shape[-1] - 1)
    if largest >= n_keys:
        raise ValueError(f"position {largest} does not exist; choose {choices(range(n_keys))}")
    rows = rows.to(device)
    gone = torch.nn.functional.pad(removed, (0, n_keys - removed.shape[-1])).to(device)  # (B or 1, H, R, S)
    scores = call.path.scores(call.q[:, :, rows], call.k, rule=call.path.rule_for(call.rule), rows=rows)
    gone = gone & (scores > float("-inf"))
    scores = scores.masked_fill(gone, float("-inf"))
    if (lost := (scores == float("-inf")).all(-1)).any():
        query = int(rows[lost.nonzero()[0, 2]])
        raise ValueError(f"layer {call.layer}: without these edges query {query} would see no key")
    weights = scores.softmax(-1)
    kept = (weights @ repeat_groups(call.v, weights.shape[1]).to(weights.dtype)).to(call.out.dtype)  # (B, H, R, D)
    out = call.out.clone()
    out[:, :, rows] = torch.where(gone.any(-1, keepdim=True), kept, out[:, :, rows])
    return out


@contextmanager
def patching(model: GPT, layer: int, at: Tensor, stream: Tensor) -> Iterator[None]:
    """The residual stream that enters `layer` is `stream` (B or 1, T, C) where `at` (B or 1, T) is true."""

    def hook(_block: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.where(at[..., None].to(args[0].device), stream, args[0]), *args[1:])

    handle = model.blocks[layer].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def streams(model: GPT, tokens: Tensor) -> list[Tensor]:
    """The residual stream (B, T, C) that enters each layer, and last the one that leaves the blocks."""
    kept: list[Tensor] = []
    handles = [block.register_forward_pre_hook(lambda _, args: kept.append(args[0])) for block in model.blocks]
    handles.append(model.blocks[-1].register_forward_hook(lambda _, __, out: kept.append(out)))
    try:
        model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return kept


def check_heads(model: GPT, heads: Iterable[Head]) -> None:
    """ValueError, with the choices, for a layer or head that is not there."""
    n_layer, n_head = model.config.n_layer, model.config.n_head
    for layer, head in heads:
        if not 0 <= layer < n_layer:
            raise ValueError(f"layer {layer} does not exist; choose {choices(range(n_layer))}")
        if not 0 <= head < n_head:
            raise ValueError(f"head {head} does not exist; choose {choices(range(n_head))}")


def check_softmax(model: GPT, layer: int) -> None:
    """ValueError when the layer's path has no rows that renormalise."""
    path: Any = model.get_submodule(f"blocks.{layer}.attn.path")
    if "log_sum_exp" not in path.supports:
        raise ValueError(f"layer {layer}: attention path {path.name!r} is no softmax; no edge of it can be knocked out")
