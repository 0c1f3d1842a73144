# mypy: disallow-untyped-defs=false
# (what triton.jit decorates is a language of its own, without Python's types)
"""FlashAttention on a GPU: the algorithm of `tiled` (Dao et al. 2022; Dao 2023) as Triton kernels. Needs Triton.

A GPU runs many programs side by side, each with a little fast memory of its own; what the programs share is large and
slow. So each program takes one block of rows (or, for the gradients of k and v, of columns), keeps all that belongs to
it in fast memory and walks over the blocks of the other side. A tile of scores lives and dies inside a program; no two
programs write to the same place. Sums are float32, whatever the inputs are.

Axes as in path.py, all tensors contiguous. A head is counted over the batch, 0 … B·H, and shares keys and values
head // n_share, so grouped heads copy nothing. `rows` and `columns` are positions among the S keys; pointers to
queries are moved back by S - T places to be indexed by them. D is head_dim filled up to a power of two with zeros,
which change no product. A rule without a window is a window of S.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.attention._blockwise import Scoring


@triton.jit
def _load(matrix, at, end, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Rows `at` of a (·, HEAD_DIM) matrix as a tile (len(at), D), zero from row `end` and column HEAD_DIM on."""
    d = tl.arange(0, D)
    there = (at < end)[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(matrix + at[:, None] * HEAD_DIM + d[None, :], mask=there, other=0.0)


@triton.jit
def _store(matrix, at, end, tile, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """The reverse of _load, in the dtype of the matrix."""
    d = tl.arange(0, D)
    there = (at < end)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(matrix + at[:, None] * HEAD_DIM + d[None, :], tile.to(matrix.dtype.element_ty), mask=there)


@triton.jit
def _place(n_positions, BLOCK: tl.constexpr):
    """Which head and which of its blocks this program is for; the head in 64 bits, for its products pass 2³¹."""
    n_blocks = tl.cdiv(n_positions, BLOCK)
    return (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks


@triton.jit
def _reach(first, last, begin, end, window, n_global, PAST: tl.constexpr, FUTURE: tl.constexpr):
    """Which positions of [begin, end) the block first..last may meet: the globals in [begin, far), its neighbours in
    [start, stop). Tiles outside of both are never visited."""
    start, stop = max(begin, first), min(end, last + 1)
    if PAST:
        start = tl.where(first < n_global, begin, max(begin, first - window + 1))
    if FUTURE:
        stop = tl.where(first < n_global, end, min(end, last + window))
    far = max(begin, min(n_global, start)) if PAST else begin
    return far, start, max(start, stop)


@triton.jit
def _tile(number, begin, far, start, stop, BLOCK: tl.constexpr):
    """The positions of a tile of [begin, far) or, after those, of [start, stop); and the end of its part."""
    n_far = tl.cdiv(far - begin, BLOCK)
    at = tl.where(number < n_far, begin + number * BLOCK, start + (number - n_far) * BLOCK)
    return at + tl.arange(0, BLOCK), tl.where(number < n_far, far, stop)


@triton.jit
def _scores(
    q, k, rows, columns, there, head, documents, n_keys, window, n_global, n_head,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scores (R, C) of tiles q (R, D) and k (C, D), -inf where the rule forbids the pair; and their derivative after
    q·k."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE  # else float32 would lose 13 bits to TF32
    derivative = SCALE
    if SOFTCAP > 0:
        bounded = 2 * tl.sigmoid(2 * scores / SOFTCAP) - 1  # tanh, which Triton lacks
        scores, derivative = SOFTCAP * bounded, SCALE * (1 - bounded * bounded)
    i, j = rows[:, None], columns[None, :]
    if ALIBI:
        scores -= tl.exp2(-8.0 * (head % n_head + 1) / n_head) * tl.abs(i - j)
    seen = there & ((tl.abs(i - j) < window) | (i < n_global) | (j < n_global))
    if CAUSAL:
        seen &= j <= i
    if documents is not None:
        ids = documents + head // n_head * n_keys
        row_ids = tl.load(ids + rows, mask=rows < n_keys, other=-1)
        column_ids = tl.load(ids + columns, mask=columns < n_keys, other=-1)
        seen &= row_ids[:, None] == column_ids[None, :]
    return tl.where(seen, scores, float("-inf")), derivative


@triton.jit
def _forward(
    q, k, v, out, lse, documents, n_queries, n_keys, window, n_global, n_head, n_share,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head: out, and the natural logarithm of each row's normaliser."""
    head, block = _place(n_queries, BLOCK)
    first = n_keys - n_queries + block * BLOCK
    rows = first + tl.arange(0, BLOCK)
    at_rows, at_columns = (head + 1) * n_queries - n_keys, head // n_share * n_keys
    q_i = _load(q + at_rows * HEAD_DIM, rows, n_keys, HEAD_DIM, D)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, D], tl.float32)
    far, start, stop = _reach(first, first + BLOCK - 1, 0, n_keys, window, n_global, True, not CAUSAL)
    for number in range(tl.cdiv(far, BLOCK) + tl.cdiv(stop - start, BLOCK)):
        columns, end = _tile(number, 0, far, start, stop, BLOCK)
        k_j = _load(k + at_columns * HEAD_DIM, columns, end, HEAD_DIM, D)
        v_j = _load(v + at_columns * HEAD_DIM, columns, end, HEAD_DIM, D)
        scores, _ = _scores(
            q_i, k_j, rows, columns, (columns < end)[None, :], head, documents, n_keys, window, n_global, n_head,
            SCALE, SOFTCAP, ALIBI, CAUSAL,
        )  # fmt: skip
        # What was summed so far was relative to the largest score of a row; a larger one shrinks it.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that has seen no key yet
        weights = tl.exp(scores - finite[:, None])
        shrink = tl.exp(largest - finite)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v_j.dtype), v_j, input_precision="ieee")
        largest = new_largest
    total = tl.where(rows < n_keys, total, 1.0)  # rows past the end, which are not stored, may have seen no key
    _store(out + at_rows * HEAD_DIM, rows, n_keys, mixed / total[:, None], HEAD_DIM, D)
    tl.store(lse + at_rows + rows, largest + tl.log(total), mask=rows < n_keys)


@triton.jit
def _backward_rows(
    q, k, v, grad_out, grad_q, lse, delta, documents, n_queries, n_keys, window, n_global, n_head, n_share,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head: the gradient of its queries."""
    head, block = _place(n_queries, BLOCK)
    first = n_keys - n_queries + block * BLOCK
    rows = first + tl.arange(0, BLOCK)
    at_rows, at_columns = (head + 1) * n_queries - n_keys, head // n_share * n_keys
    q_i = _load(q + at_rows * HEAD_DIM, rows, n_keys, HEAD_DIM, D)
    grad_i = _load(grad_out + at_rows * HEAD_DIM, rows, n_keys, HEAD_DIM, D)
    lse_i = tl.load(lse + at_rows + rows, mask=rows < n_keys, other=0.0)
    delta_i = tl.load(delta + at_rows + rows, mask=rows < n_keys, other=0.0)

    total = tl.zeros([BLOCK, D], tl.float32)
    far, start, stop = _reach(first, first + BLOCK - 1, 0, n_keys, window, n_global, True, not CAUSAL)
    for number in range(tl.cdiv(far, BLOCK) + tl.cdiv(stop - start, BLOCK)):
        columns, end = _tile(number, 0, far, start, stop, BLOCK)
        k_j = _load(k + at_columns * HEAD_DIM, columns, end, HEAD_DIM, D)
        v_j = _load(v + at_columns * HEAD_DIM, columns, end, HEAD_DIM, D)
        scores, derivative = _scores(
            q_i, k_j, rows, columns, (columns < end)[None, :], head, documents, n_keys, window, n_global, n_head,
            SCALE, SOFTCAP, ALIBI, CAUSAL,
        )  # fmt: skip
        weights = tl.exp(scores - lse_i[:, None])
        grad_weights = tl.dot(grad_i, tl.trans(v_j), input_precision="ieee")
        grad_products = weights * (grad_weights - delta_i[:, None]) * derivative
        total += tl.dot(grad_products.to(k_j.dtype), k_j, input_precision="ieee")
    _store(grad_q + at_rows * HEAD_DIM, rows, n_keys, total, HEAD_DIM, D)


@triton.jit
def _backward_columns(
    q, k, v, grad_out, grad_k, grad_v, lse, delta, documents, n_queries, n_keys, window, n_global, n_head, n_share,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of columns of one key-value head: the gradients of its keys and values, from all heads that share
    them."""
    group, block = _place(n_keys, BLOCK)
    first, offset = block * BLOCK, n_keys - n_queries
    columns = first + tl.arange(0, BLOCK)
    k_j = _load(k + group * n_keys * HEAD_DIM, columns, n_keys, HEAD_DIM, D)
    v_j = _load(v + group * n_keys * HEAD_DIM, columns, n_keys, HEAD_DIM, D)

    total_k, total_v = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
    far, start, stop = _reach(first, first + BLOCK - 1, offset, n_keys, window, n_global, not CAUSAL, True)
    for head in range(group * n_share, (group + 1) * n_share):
        at_rows = head * n_queries - offset
        for number in range(tl.cdiv(far - offset, BLOCK) + tl.cdiv(stop - start, BLOCK)):
            rows, end = _tile(number, offset, far, start, stop, BLOCK)
            q_i = _load(q + at_rows * HEAD_DIM, rows, end, HEAD_DIM, D)
            grad_i = _load(grad_out + at_rows * HEAD_DIM, rows, end, HEAD_DIM, D)
            lse_i = tl.load(lse + at_rows + rows, mask=rows < end, other=0.0)
            delta_i = tl.load(delta + at_rows + rows, mask=rows < end, other=0.0)
            scores, derivative = _scores(
                q_i, k_j, rows, columns, (rows < end)[:, None], head, documents, n_keys, window, n_global, n_head,
                SCALE, SOFTCAP, ALIBI, CAUSAL,
            )  # fmt: skip
            weights = tl.exp(scores - lse_i[:, None])
            total_v += tl.dot(tl.trans(weights.to(grad_i.dtype)), grad_i, input_precision="ieee")
            grad_weights = tl.dot(grad_i, tl.trans(v_j), input_precision="ieee")
            grad_products = weights * (grad_weights - delta_i[:, None]) * derivative
            total_k += tl.dot(tl.trans(grad_products.to(q_i.dtype)), q_i, input_precision="ieee")
    _store(grad_k + group * n_keys * HEAD_DIM, columns, n_keys, total_k, HEAD_DIM, D)
    _store(grad_v + group * n_keys * HEAD_DIM, columns, n_keys, total_v, HEAD_DIM, D)


def block_size(padded_dim: int, dtype: torch.dtype) -> int:
    """Rows and columns of a tile, so that all tiles of a program fit into 99 KB, the least that a GPU has since 2020's
    (compute capability 8.6)."""
    return 64 if dtype.itemsize == 2 else min(64, 2048 // padded_dim)


def _arguments(q: Tensor, k: Tensor, scoring: Scoring) -> tuple[list[Any], dict[str, Any]]:
    """What all kernels are told alike: values that vary from call to call, and constants that each compiles anew."""
    rule, n_keys, head_dim = scoring.rule, k.shape[2], q.shape[3]
    documents = rule.documents
    if documents is not None:
        documents = documents[:, :n_keys].expand(q.shape[0], -1).contiguous()
    window, n_global = (n_keys, 0) if rule.window is None else (rule.window, rule.n_global)
    padded = max(16, triton.next_power_of_2(head_dim))  # 16 is the least that tl.dot takes
    constants = {
        "SCALE": scoring.scale, "SOFTCAP": scoring.softcap, "ALIBI": scoring.alibi, "CAUSAL": rule.causal,
        "HEAD_DIM": head_dim, "D": padded, "BLOCK": block_size(padded, q.dtype),
    }  # fmt: skip
    return [documents, q.shape[2], n_keys, window, n_global, q.shape[1], q.shape[1] // k.shape[1]], constants


@torch.compiler.disable  # it is compiled as it stands; tracing it would gain nothing
def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, G, S, D), D ≤ 128 -> out (B, H, T, D) and log-sum-exp (B, H, T) in float32."""
    return TritonFunction.apply(q, k, v, scoring)


class TritonFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        values, constants = _arguments(q, k, scoring)
        grid = (triton.cdiv(q.shape[2], constants["BLOCK"]) * q.shape[0] * q.shape[1],)
        with torch.cuda.device_of(q):  # Triton launches on the current GPU
            _forward[grid](q, k, v, out, lse, *values, **constants)
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
        values, constants = _arguments(q, k, ctx.scoring)
        n_rows, n_columns = (triton.cdiv(x.shape[2], constants["BLOCK"]) * x.shape[0] * x.shape[1] for x in (q, k))
        with torch.cuda.device_of(q):
            _backward_rows[(n_rows,)](q, k, v, grad_out, grad_q, lse, delta, *values, **constants)
            _backward_columns[(n_columns,)](q, k, v, grad_out, grad_k, grad_v, lse, delta, *values, **constants)
        return grad_q, grad_k, grad_v, None
