"""Ring attention (Liu et al. 2023): one sequence over W processes, each holding 1/W of its queries, keys and values.

Keys and values travel round the ring while every process computes its own queries on those that pass, and merges the
partial results by their log-sum-exp. The causal map is a triangle, so equal contiguous parts would mean unequal work:
process r holds chunk r and chunk 2W - 1 - r of 2W ("zigzag"), which together are as long a walk for every r.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.attention._blockwise import Block, Scoring, add_gradients, add_keys, cut, empty_result
from model.attention._blockwise_path import BlockwiseAttention
from model.attention.mask import MaskRule


class RingAttention(BlockwiseAttention):
    """block: queries and keys in a tile. Under a process group q, k and v hold this process's `ring_positions` of the
    sequence, all T of them; without one, or with one process, it is a ring of one."""

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> str:  # noqa: ARG002
        return f"ring of {_place()[1]}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
        scoring = Scoring(rule, self.scale_for(q), self.softcap, self.alibi)
        q = q.unflatten(1, (k.shape[1], -1))  # (B, G, R, T, D): the R heads that share a key-value head
        out, lse = RingFunction.apply(q, k.unsqueeze(2), v.unsqueeze(2), scoring, self.block)
        return out.flatten(1, 2), lse.flatten(1, 2)


def ring_positions(n_tokens: int, rank: int, world_size: int) -> list[range]:
    """The positions that process `rank` holds, as runs. ValueError when the sequence does not divide into 2W chunks."""
    if world_size == 1:
        return [range(n_tokens)]
    if n_tokens % (2 * world_size):
        raise ValueError(
            f"a sequence of {n_tokens} tokens does not divide into {2 * world_size} chunks for a ring of {world_size}"
        )
    size = n_tokens // (2 * world_size)
    return [range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * world_size - 1 - rank)]


class RingFunction(torch.autograd.Function):
    """q (B, G, R, T, D), k and v (B, G, 1, T, D), this process's part -> its out and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, block: int) -> tuple[Tensor, Tensor]:
        rank, world_size = _place()
        rows, columns = _blocks(q, k, block)
        out, lse = result = empty_result(q, v)
        visiting = torch.stack((k, v))
        for turn in range(world_size):
            arriving = _Arrival(visiting) if turn < world_size - 1 else None  # while this process computes
            add_keys(result, q, visiting[0], visiting[1], rows[rank], columns[(rank - turn) % world_size], scoring)
            if arriving is not None:
                visiting = arriving.wait()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.others = rows[rank], columns, scoring
        ctx.mark_non_differentiable(lse)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rows, columns, scoring = ctx.others
        rank, world_size = _place()
        grad_q = torch.zeros_like(q, dtype=out.dtype)
        visiting = torch.stack((k, v))
        gradients = torch.zeros_like(visiting, dtype=out.dtype)  # of the visiting keys and values; they travel along
        for turn in range(world_size):
            arriving = _Arrival(visiting) if turn < world_size - 1 else None
            here = columns[(rank - turn) % world_size]
            visited = (grad_q, gradients[0], gradients[1])
            add_gradients(visited, (out, lse), grad_out, q, visiting[0], visiting[1], rows, here, scoring)
            if arriving is not None:
                visiting = arriving.wait()
            if world_size > 1:
                gradients = _Arrival(gradients).wait()  # after the last turn they are at home
        grad_k, grad_v = gradients
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _place() -> tuple[int, int]:
    """(rank, world_size) in the default process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _blocks(q: Tensor, k: Tensor, block: int) -> tuple[list[list[Block]], list[list[Block]]]:
    """Of every process, the blocks of its queries and of its keys."""
    world_size = _place()[1]
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    if world_size == 1:  # the queries are the last T of the S positions
        return [cut([range(n_keys - n_queries, n_keys)], block)], [cut([range(n_keys)], block)]
    if n_queries != n_keys:
        raise ValueError(
            f"a ring of {world_size} does not decode ({n_queries} queries, {n_keys} keys); use one process"
        )
    parts = [cut(ring_positions(n_keys * world_size, rank, world_size), block) for rank in range(world_size)]
    return parts, parts


class _Arrival:
    """A tensor on its way from the process before, while ours goes to the next."""

    def __init__(self, leaving: Tensor) -> None:
        rank, world_size = _place()
        self.leaving, self.arriving = leaving.contiguous(), torch.empty_like(leaving)  # both must live until wait()
        self.work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.leaving, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, self.arriving, (rank - 1) % world_size),
            ]
        )

    def wait(self) -> Tensor:
        for work in self.work:
            work.wait()
        return self.arriving
