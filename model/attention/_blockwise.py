"""Attention over blocks of rows and columns: what `tiled` and `ring` are both made of.

Online softmax (Milakov & Gimelshein 2018): the softmax of a row can be put together from pieces of the row. A piece
with normaliser l1 = Σ exp(s) and another with l2 have together l1 + l2, and their outputs the mean weighted by l1 and
l2. FlashAttention (Dao et al. 2022) does this over blocks of one sequence, ring attention (Liu et al. 2023) over the
parts of a sequence that lie in different processes.

Axes here: q (B, G, R, T, D), where R query heads share each of the G key-value heads; k and v (B, G, 1, S, D).
Everything is computed in at least float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention.mask import MaskRule
from model.attention.path import alibi_slopes

# Where a block lies in a tensor, and which positions of the whole sequence it holds.
Block = tuple[slice, range]


@dataclass(frozen=True)
class Scoring:
    """How q·k becomes a score: times `scale`, bounded by `softcap` (0 is off), less slope·distance under `alibi`."""

    rule: MaskRule
    scale: float
    softcap: float = 0.0
    alibi: bool = False


def cut(positions: Sequence[range], block: int) -> list[Block]:
    """A tensor that holds these runs of positions one after the other, cut into blocks of at most `block`."""
    blocks, offset = [], 0
    for run in positions:
        for start in range(run.start, run.stop, block):
            part = range(start, min(start + block, run.stop))
            blocks.append((slice(offset, offset + len(part)), part))
            offset += len(part)
    return blocks


def empty_result(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, G, R, T, D) and log-sum-exp (B, G, R, T) of rows that have seen no key yet."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)


def add_keys(
    result: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: list[Block],
    columns: list[Block],
    scoring: Scoring,
) -> None:
    """Merges what these keys and values contribute into `result` (out, log-sum-exp), in place, a tile at a time."""
    out, lse = result
    for i, j, scores in _tiles(q, k, rows, columns, scoring):
        new_lse = scores.logsumexp(-1)
        weights = torch.exp(scores - _finite(new_lse).unsqueeze(-1))
        total = torch.logaddexp(lse[..., i], new_lse)
        old_share = torch.exp(lse[..., i] - _finite(total)).unsqueeze(-1)
        new_share = torch.exp(new_lse - _finite(total)).unsqueeze(-1)
        out[..., i, :] = old_share * out[..., i, :] + new_share * (weights @ v[..., j, :].to(out.dtype))
        lse[..., i] = total


def add_gradients(
    gradients: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: list[Block],
    columns: list[Block],
    scoring: Scoring,
) -> None:
    """Adds what these keys and values contribute to `gradients` (dq, dk, dv), in place, a tile at a time.

    The weights are recomputed from the scores and the saved log-sum-exp (Dao et al. 2022, appendix B.2), never kept.
    """
    grad_q, grad_k, grad_v = gradients
    out, lse = result
    dtype = out.dtype
    delta = (grad_out.to(dtype) * out).sum(-1)  # (B, G, R, T): Σ_j weight_j · (grad_out·v_j) of each row
    for i, j, scores in _tiles(q, k, rows, columns, scoring):
        q_i, k_j, v_j, grad_i = (
            q[..., i, :].to(dtype),
            k[..., j, :].to(dtype),
            v[..., j, :].to(dtype),
            grad_out[..., i, :],
        )
        grad_i = grad_i.to(dtype)
        weights = torch.exp(scores - lse[..., i].unsqueeze(-1))  # exactly 0 where the score is -inf
        grad_v[..., j, :] += (weights.mT @ grad_i).sum(2, keepdim=True)  # the R heads share these values
        grad_scores = weights * (grad_i @ v_j.mT - delta[..., i].unsqueeze(-1))
        if scoring.softcap > 0:  # d/dx c·tanh(x/c) = 1 - tanh²(x/c)
            grad_scores *= 1 - torch.tanh(q_i @ k_j.mT * scoring.scale / scoring.softcap).square()
        grad_q[..., i, :] += grad_scores @ k_j * scoring.scale
        grad_k[..., j, :] += (grad_scores.mT @ q_i).sum(2, keepdim=True) * scoring.scale


def _tiles(
    q: Tensor, k: Tensor, rows: list[Block], columns: list[Block], scoring: Scoring
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, columns, scores (B, G, R, T, S)) of every tile in which the rule may allow a pair; -inf where it does
    not."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    rule = scoring.rule
    for i, row_positions in rows:
        for j, column_positions in columns:
            if not rule.allows_any(row_positions, column_positions):
                continue
            scores = q[..., i, :].to(dtype) @ k[..., j, :].to(dtype).mT * scoring.scale
            if scoring.softcap > 0:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            at, to = (torch.arange(p.start, p.stop, device=q.device) for p in (row_positions, column_positions))
            if scoring.alibi:
                n_groups, n_repeats = q.shape[1:3]
                slopes = alibi_slopes(n_groups * n_repeats, dtype, q.device).view(n_groups, n_repeats, 1, 1)
                scores = scores - slopes * (at[:, None] - to[None, :]).abs()
            if not rule.allows_all(row_positions, column_positions):
                allowed = rule.allowed(at, to)  # (T, S), or (B, 1, T, S) with documents
                allowed = allowed if allowed.dim() == 2 else allowed.unsqueeze(2)
                scores = scores.masked_fill(~allowed, float("-inf"))
            yield i, j, scores


def _finite(lse: Tensor) -> Tensor:
    """-inf, of rows that see none of the keys, as 0: exp(-inf - 0) is 0 where exp(-inf + inf) would be NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)
