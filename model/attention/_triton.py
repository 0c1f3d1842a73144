# mypy: disallow-untyped-defs=false
# (what triton.jit decorates is a language of its own, without Python's types)
"""FlashAttention on a GPU: the algorithm of `tiled` (Dao et al. 2022; Dao 2023) as Triton kernels. Needs Triton.

A GPU runs many programs at a time, each with a little fast memory; the memory that they share is large and slow. So a
program takes one block of rows (or, for the gradients of k and v, of columns), keeps what belongs to it in fast memory
and walks over the blocks of the other side. Tiles of scores never leave it, and no two programs write to one place.
Sums are float32, whatever the inputs are.

Axes as in path.py, tensors contiguous. `head` counts over the batch, 0 … B·H, and head h reads keys and values
h // n_share: grouped heads copy nothing. `rows` and `columns` are positions among the S keys; `at_rows` is where a head
would begin if it had a query for each of them. Head_dim is padded with zeros, which change no product.
"""

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.attention._blockwise import Scoring

# What all kernels are told alike; they are compiled anew for other values of what comes after n_global.
Task = namedtuple(
    "Task",
    "documents n_queries n_keys n_head n_share window n_global causal scale softcap alibi head_dim padded_dim block",
)


@triton.jit
def _load(matrix, at, end, task):
    """Rows `at` of a (·, head_dim) matrix as a tile (len(at), padded_dim); zero from `end` on and in the padding."""
    d = tl.arange(0, task.padded_dim)
    there = (at < end)[:, None] & (d < task.head_dim)[None, :]
    return tl.load(matrix + at[:, None] * task.head_dim + d[None, :], mask=there, other=0.0)


@triton.jit
def _store(matrix, at, end, tile, task):
    """The reverse of _load, in the dtype of the matrix."""
    d = tl.arange(0, task.padded_dim)
    there = (at < end)[:, None] & (d < task.head_dim)[None, :]
    tl.store(matrix + at[:, None] * task.head_dim + d[None, :], tile.to(matrix.dtype.element_ty), mask=there)


@triton.jit
def _place(begin, task):
    """What this program is for: its head, and the first and all positions of its block of [begin, n_keys)."""
    n_blocks = tl.cdiv(task.n_keys - begin, task.block)
    first = begin + tl.program_id(0) % n_blocks * task.block
    head = (tl.program_id(0) // n_blocks).to(tl.int64)  # in 64 bits, for its products pass 2³¹
    return head, first, first + tl.arange(0, task.block)


@triton.jit
def _reach(first, begin, task, PAST: tl.constexpr, FUTURE: tl.constexpr):
    """What the block at `first` may meet of [begin, n_keys): globals in [begin, far), neighbours in [start, stop)."""
    far, start, stop = begin, max(begin, first), min(task.n_keys, first + task.block)
    if FUTURE:
        stop = task.n_keys if first < task.n_global else min(task.n_keys, first + task.block - 1 + task.window)
    if PAST:
        start = begin if first < task.n_global else max(begin, first - task.window + 1)
        far = max(begin, min(task.n_global, start))
    return far, start, max(start, stop)


@triton.jit
def _tile(number, begin, far, start, stop, task):
    """The positions of a tile of [begin, far) or, after those, of [start, stop); and the end of its part."""
    n_far = tl.cdiv(far - begin, task.block)
    at = tl.where(number < n_far, begin + number * task.block, start + (number - n_far) * task.block)
    return at + tl.arange(0, task.block), tl.where(number < n_far, far, stop)


@triton.jit
def _scores(q, k, rows, columns, there, head, task):
    """Scores (R, C) of tiles q (R, D) and k (C, D), -inf where a pair is forbidden; and their derivative by q·k."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * task.scale  # else float32 would lose 13 bits to TF32
    derivative = task.scale
    if task.softcap > 0:
        bounded = 2 * tl.sigmoid(2 * scores / task.softcap) - 1  # tanh, which Triton lacks
        scores, derivative = task.softcap * bounded, task.scale * (1 - bounded * bounded)
    i, j = rows[:, None], columns[None, :]
    if task.alibi:
        scores -= tl.exp2(-8.0 * (head % task.n_head + 1) / task.n_head) * tl.abs(i - j)
    seen = there & ((tl.abs(i - j) < task.window) | (i < task.n_global) | (j < task.n_global))
    if task.causal:
        seen &= j <= i
    if task.documents is not None:
        ids = task.documents + head // task.n_head * task.n_keys
        row_ids = tl.load(ids + rows, mask=rows < task.n_keys, other=-1)
        column_ids = tl.load(ids + columns, mask=columns < task.n_keys, other=-1)
        seen &= row_ids[:, None] == column_ids[None, :]
    return tl.where(seen, scores, float("-inf")), derivative


@triton.jit
def _forward(q, k, v, out, lse, task):
    """One block of rows of one head: out, and the natural logarithm of each row's normaliser."""
    head, first, rows = _place(task.n_keys - task.n_queries, task)
    at_rows, at_columns = (head + 1) * task.n_queries - task.n_keys, head // task.n_share * task.n_keys
    q_i = _load(q + at_rows * task.head_dim, rows, task.n_keys, task)

    largest = tl.full([task.block], -1e30, tl.float32)  # less than any score, and finite: -inf - -inf would be NaN
    total = tl.zeros([task.block], tl.float32)
    mixed = tl.zeros([task.block, task.padded_dim], tl.float32)
    far, start, stop = _reach(first, 0, task, True, not task.causal)
    for number in range(tl.cdiv(far, task.block) + tl.cdiv(stop - start, task.block)):
        columns, end = _tile(number, 0, far, start, stop, task)
        k_j = _load(k + at_columns * task.head_dim, columns, end, task)
        v_j = _load(v + at_columns * task.head_dim, columns, end, task)
        scores, _ = _scores(q_i, k_j, rows, columns, (columns < end)[None, :], head, task)
        # What was summed so far was relative to the largest score of a row; a larger one shrinks it.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v_j.dtype), v_j, input_precision="ieee")
        largest = new_largest
    total = tl.where(rows < task.n_keys, total, 1.0)  # rows past the end, which are not stored, may have seen no key
    _store(out + at_rows * task.head_dim, rows, task.n_keys, mixed / total[:, None], task)
    tl.store(lse + at_rows + rows, largest + tl.log(total), mask=rows < task.n_keys)


@triton.jit
def _backward_rows(q, k, v, grad_out, grad_q, lse, delta, task):
    """One block of rows of one head: the gradient of its queries."""
    head, first, rows = _place(task.n_keys - task.n_queries, task)
    at_rows, at_columns = (head + 1) * task.n_queries - task.n_keys, head // task.n_share * task.n_keys
    q_i = _load(q + at_rows * task.head_dim, rows, task.n_keys, task)
    grad_i = _load(grad_out + at_rows * task.head_dim, rows, task.n_keys, task)
    lse_i = tl.load(lse + at_rows + rows, mask=rows < task.n_keys, other=0.0)
    delta_i = tl.load(delta + at_rows + rows, mask=rows < task.n_keys, other=0.0)

    total = tl.zeros([task.block, task.padded_dim], tl.float32)
    far, start, stop = _reach(first, 0, task, True, not task.causal)
    for number in range(tl.cdiv(far, task.block) + tl.cdiv(stop - start, task.block)):
        columns, end = _tile(number, 0, far, start, stop, task)
        k_j = _load(k + at_columns * task.head_dim, columns, end, task)
        v_j = _load(v + at_columns * task.head_dim, columns, end, task)
        scores, derivative = _scores(q_i, k_j, rows, columns, (columns < end)[None, :], head, task)
        weights = tl.exp(scores - lse_i[:, None])
        grad_weights = tl.dot(grad_i, tl.trans(v_j), input_precision="ieee")
        grad_products = weights * (grad_weights - delta_i[:, None]) * derivative
        total += tl.dot(grad_products.to(k_j.dtype), k_j, input_precision="ieee")
    _store(grad_q + at_rows * task.head_dim, rows, task.n_keys, total, task)


@triton.jit
def _backward_columns(q, k, v, grad_out, grad_k, grad_v, lse, delta, task):
    """One block of columns of one key-value head: the gradients of its keys and values, from all that share them."""
    group, first, columns = _place(0, task)
    offset, at_columns = task.n_keys - task.n_queries, group * task.n_keys
    k_j = _load(k + at_columns * task.head_dim, columns, task.n_keys, task)
    v_j = _load(v + at_columns * task.head_dim, columns, task.n_keys, task)

    total_k = tl.zeros([task.block, task.padded_dim], tl.float32)
    total_v = tl.zeros([task.block, task.padded_dim], tl.float32)
    far, start, stop = _reach(first, offset, task, not task.causal, True)
    for head in range(group * task.n_share, (group + 1) * task.n_share):
        at_rows = head * task.n_queries - offset
        for number in range(tl.cdiv(far - offset, task.block) + tl.cdiv(stop - start, task.block)):
            rows, end = _tile(number, offset, far, start, stop, task)
            q_i = _load(q + at_rows * task.head_dim, rows, end, task)
            grad_i = _load(grad_out + at_rows * task.head_dim, rows, end, task)
            lse_i = tl.load(lse + at_rows + rows, mask=rows < end, other=0.0)
            delta_i = tl.load(delta + at_rows + rows, mask=rows < end, other=0.0)
            scores, derivative = _scores(q_i, k_j, rows, columns, (rows < end)[:, None], head, task)
            weights = tl.exp(scores - lse_i[:, None])
            total_v += tl.dot(tl.trans(weights.to(grad_i.dtype)), grad_i, input_precision="ieee")
            grad_weights = tl.dot(grad_i, tl.trans(v_j), input_precision="ieee")
            grad_products = weights * (grad_weights - delta_i[:, None]) * derivative
            total_k += tl.dot(tl.trans(grad_products.to(q_i.dtype)), q_i, input_precision="ieee")
    _store(grad_k + at_columns * task.head_dim, columns, task.n_keys, total_k, task)
    _store(grad_v + at_columns * task.head_dim, columns, task.n_keys, total_v, task)


def block_size(padded_dim: int, dtype: torch.dtype) -> int:
    """Rows and columns of a tile, so that a program's tiles fit into the 99 KB of compute capability 8.6 and 12."""
    return 64 if dtype.itemsize == 2 else min(64, 2048 // padded_dim)


def _task(q: Tensor, k: Tensor, scoring: Scoring) -> Task:
    rule, n_keys, head_dim = scoring.rule, k.shape[2], q.shape[3]
    documents = None if rule.documents is None else rule.documents[:, :n_keys].expand(q.shape[0], -1).contiguous()
    window, n_global = (n_keys, 0) if rule.window is None else (rule.window, rule.n_global)
    padded_dim = max(16, triton.next_power_of_2(head_dim))  # 16 is the least that tl.dot takes
    block = block_size(padded_dim, q.dtype)
    constants = rule.causal, scoring.scale, scoring.softcap, scoring.alibi, head_dim, padded_dim, block
    sizes = q.shape[2], n_keys, q.shape[1], q.shape[1] // k.shape[1], window, n_global
    return Task(documents, *sizes, *map(tl.constexpr, constants))


def _launch(kernel: Any, x: Tensor, *arguments: Any) -> None:
    """One program for each block of the positions of x (B, heads, positions, D), on the GPU where x is."""
    n_programs = triton.cdiv(x.shape[2], arguments[-1].block.value) * x.shape[0] * x.shape[1]
    with torch.cuda.device_of(x):
        kernel[(n_programs,)](*arguments, num_stages=2)  # more tiles on their way would need more fast memory


class TritonFunction(torch.autograd.Function):
    """q (B, H, T, D), k and v (B, G, S, D), D ≤ 128 -> out (B, H, T, D) and log-sum-exp (B, H, T) in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        _launch(_forward, q, q, k, v, out, lse, _task(q, k, scoring))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scoring = scoring
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        delta = (grad_out.float() * out.float()).sum(-1)  # (B, H, T)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        task = _task(q, k, ctx.scoring)
        _launch(_backward_rows, q, q, k, v, grad_out, grad_q, lse, delta, task)
        _launch(_backward_columns, k, q, k, v, grad_out, grad_k, grad_v, lse, delta, task)
        return grad_q, grad_k, grad_v, None


attend = torch.compiler.disable(TritonFunction.apply)  # Triton has compiled it; tracing it would gain nothing
