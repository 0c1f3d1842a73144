"""Statistics of attention maps that are never stored: each is one walk over blocks of rows, in O(T·rows) memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model import GPT
from probes.metadata import allowed_pairs, is_plain_causal

if TYPE_CHECKING:
    from probes.record import AttentionRecord


@dataclass(frozen=True)
class RowStatistics:
    """Of each row i of one head's map A, all (T,) float32.

    entropy     -Σ_j A[i, j] ln A[i, j], nats (Clark et al. 2019).
    reference   the entropy of a uniform row: ln of the number of keys that i may see; ln(i + 1) under a causal mask.
    distance    Σ_j A[i, j]·|i - j|.
    sink        Σ of A[i, j] over the first keys.
    confidence  max_j A[i, j] (Voita et al. 2019).
    offset      i - argmax_j A[i, j].
    """

    entropy: Tensor
    reference: Tensor
    distance: Tensor
    sink: Tensor
    confidence: Tensor
    offset: Tensor

    def summary(self) -> dict[str, float]:
        """Means over rows; `entropy_share` is mean entropy / mean reference, NaN when every row sees one key."""
        entropy, reference = float(self.entropy.mean()), float(self.reference.mean())
        # A row that sees one key has its largest weight there whatever the head does; still it counts (Voita et al.).
        offsets, counts = self.offset.unique(return_counts=True)
        return {
            "entropy": entropy,
            "entropy_share": entropy / reference if reference > 0 else math.nan,
            "distance": float(self.distance.mean()),
            "sink": float(self.sink.mean()),
            "confidence": float(self.confidence.mean()),
            "positional": float(counts.max()) / len(self.offset),
            "offset": int(offsets[counts.argmax()]),
        }


def statistics(record: "AttentionRecord", layer: int, head: int, *, n_sink: int = 1) -> RowStatistics:
    """One walk over the map; each block of rows is looked at while it lies in cache."""
    info, n = record.layer_info(layer), record.n_tokens
    places = torch.arange(n, dtype=torch.float32)
    parts: list[list[Tensor]] = []
    for rows, reach, weights, logs in record.log_bands(layer, head):
        i, j = places[rows], places[reach]
        entropy = -torch.linalg.vecdot(weights, logs)
        # No key lies after its query where the rule is causal: the mean distance follows from the mean position.
        distance = i - weights @ j if info.rule.causal else (weights * (i[:, None] - j).abs()).sum(-1)
        confidence, argmax = weights.max(-1)
        sink = weights[:, : max(0, n_sink - reach.start)].sum(-1)
        reference = i + 1 if is_plain_causal(info.rule) else allowed_pairs(info.rule, i.long(), j.long()).sum(-1)
        offset = torch.arange(rows.start, rows.stop) - reach.start - argmax
        parts.append([entropy.clamp_min(0), reference.log(), distance.clamp_min(0), sink, confidence, offset])
    return RowStatistics(*map(torch.cat, zip(*parts, strict=True)))


def top_keys(record: "AttentionRecord", layer: int, head: int, i: int, k: int) -> list[tuple[int, float]]:
    """The k keys that query i looks at most, heaviest first, as (position, weight); fewer when it may see fewer."""
    if k < 1:
        raise ValueError(f"the top {k} keys; at least 1 can be asked for")
    weights = record.row(layer, head, i)
    rule = record.layer_info(layer).rule
    places = allowed_pairs(rule, torch.tensor([i]), torch.arange(record.n_tokens))[0].nonzero().flatten()
    heaviest, order = weights[places].topk(min(k, len(places)))
    return list(zip(places[order].tolist(), heaviest.tolist(), strict=True))


def received(record: "AttentionRecord", layer: int, head: int) -> tuple[Tensor, Tensor]:
    """The attention that each key receives: the mean of A[:, j] over the queries that may see j, (T,) float32 (Zhang et
    al. 2023), and the number of those queries."""
    sums = torch.zeros(record.n_tokens, dtype=torch.float64)
    counts = torch.zeros(record.n_tokens, dtype=torch.float64)
    columns, rule = torch.arange(record.n_tokens), record.layer_info(layer).rule
    if is_plain_causal(rule):
        counts += record.n_tokens - columns
    for rows, reach, weights in record.bands(layer, head):
        sums[reach] += weights.sum(0)
        if not is_plain_causal(rule):
            counts[reach] += allowed_pairs(rule, torch.arange(rows.start, rows.stop), columns[reach]).sum(0)
    return (sums / counts).float(), counts.long()


def map_difference(a: "AttentionRecord", b: "AttentionRecord", layer: int, head: int) -> float:
    """Mean over rows of the share of attention that lies elsewhere, ½ Σ_j |A[i, j] - B[i, j]|: 0 is the same map, 1 is
    no key in common."""
    if a.n_tokens != b.n_tokens:
        raise ValueError(f"maps of {a.n_tokens} and {b.n_tokens} tokens have no difference")
    blocks = zip(a.row_blocks(layer, head), b.row_blocks(layer, head), strict=True)
    return sum(float((x - y).abs().sum()) / 2 for (_, x), (_, y) in blocks) / a.n_tokens


def rollout(record: "AttentionRecord", rows: Sequence[int], *, model: GPT | None = None) -> Tensor:
    """How much of each input token reaches the chosen rows through all layers, (rows, T) float32; sums to one.

    Abnar & Zuidema 2020: the product over layers of (Ā + I)/2, Ā the mean over heads, I the residual. From the last
    layer down it is a product with a few rows only, so no map is held: O(rows·T) memory.

    With `model` the weights of each head are first multiplied by the norm of what they carry, ‖W_O v_j‖ (Kobayashi et
    al. 2020), and the rows of the heads' sum scaled to one; the record then needs values. That sum of norms ignores
    that heads can cancel. ValueError when the record lacks layers before its last, or values.
    """
    if record.layers != tuple(range(len(record.layers))):
        raise ValueError(f"a rollout goes through all layers; this record has {record.layers}")
    if not all(0 <= i < record.n_tokens for i in rows):
        raise ValueError(f"rows {list(rows)}: the text has {record.n_tokens} tokens")
    flow = torch.zeros(len(rows), record.n_tokens)
    flow[torch.arange(len(rows)), torch.tensor(list(rows), dtype=torch.int64)] = 1.0
    for layer in reversed(record.layers):
        norms = None if model is None else value_norms(record, model, layer)  # (H, T)
        mixed = torch.zeros_like(flow)
        for blocks in zip(*(record.row_blocks(layer, head) for head in range(record.n_head)), strict=True):
            part = slice(blocks[0][0].start, blocks[0][0].stop)
            if norms is None:
                mean = sum((weights for _, weights in blocks), torch.zeros(())) / record.n_head  # (rows, T)
            else:
                total = sum((weights * norms[head] for head, (_, weights) in enumerate(blocks)), torch.zeros(()))
                mean = total / total.sum(-1, keepdim=True).clamp_min(1e-30)
            mixed += flow[:, part] @ mean
        flow = (flow + mixed) / 2
    return flow


@torch.no_grad()
def value_norms(record: "AttentionRecord", model: GPT, layer: int) -> Tensor:
    """‖W_O v_j‖ of every head and token, (H, T): the length of what a weight of one would add to the residual."""
    if not record.has_values:
        raise ValueError("norms need a record with values: capture it with --values")
    weight = model.get_parameter(f"blocks.{layer}.attn.o_proj.weight").detach().cpu().float()  # (C, H·D)
    values = record.tensor(layer, "v").float()  # (G, T, D)
    parts = weight.unflatten(1, (record.n_head, -1)).transpose(0, 1)  # (H, C, D)
    return torch.stack([(values[record.group(h)] @ parts[h].T).norm(dim=-1) for h in range(record.n_head)])
