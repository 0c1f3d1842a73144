"""FlashAttention from scratch (Dao et al. 2022): blocks, online softmax, recomputing backward.

Neither direction ever holds a (T, S) tensor. Forward keeps, besides its inputs and output, one log-sum-exp a row;
backward recomputes each tile of weights from it. Memory O(n·D + block²), time O(n²·D) like the explicit form.

On a GPU the same algorithm runs as Triton kernels (_triton.py), if Triton is there; `kernel` says which it is.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from model.attention._blockwise import Scoring, add_gradients, add_keys, cut, empty_result
from model.attention._blockwise_path import BlockwiseAttention
from model.attention.mask import MaskRule


class TiledAttention(BlockwiseAttention):
    """block: queries and keys in a tile. Every rule and option but dropout, any dtype, computed in at least float32."""

    _kernel_devices = ("cuda",)  # tests add "cpu" under Triton's interpreter

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._has_triton = find_spec("triton") is not None

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> str:  # noqa: ARG002
        """ "triton" where the kernels of _triton.py are able to: they know every rule, but not float64."""
        is_there = self._has_triton and q.device.type in self._kernel_devices
        fits = q.dtype in (torch.float32, torch.bfloat16, torch.float16) and q.shape[-1] <= 128 and q.numel() > 0
        is_able = not q.is_cuda or torch.cuda.get_device_capability(q.device) >= (8, 0)
        return "triton" if is_there and fits and is_able else "pytorch tiles"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
        scoring = Scoring(rule, self.scale_for(q), self.softcap, self.alibi)
        if self.kernel(q, k, v, rule=rule) == "triton":
            from model.attention._triton import attend  # here, because Triton is not everywhere

            return attend(q, k, v, scoring)
        q = q.unflatten(1, (k.shape[1], -1))  # (B, G, R, T, D): the R heads that share a key-value head
        out, lse = TiledFunction.apply(q, k.unsqueeze(2), v.unsqueeze(2), scoring, self.block)
        return out.flatten(1, 2), lse.flatten(1, 2)


class TiledFunction(torch.autograd.Function):
    """q (B, G, R, T, D), k and v (B, G, 1, S, D) -> out (B, G, R, T, D) and log-sum-exp (B, G, R, T)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, block: int) -> tuple[Tensor, Tensor]:
        n_queries, n_keys = q.shape[-2], k.shape[-2]
        rows = cut([range(n_keys - n_queries, n_keys)], block)  # the queries are the last T of the S positions
        columns = cut([range(n_keys)], block)
        out, lse = result = empty_result(q, v)
        add_keys(result, q, k, v, rows, columns, scoring)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.others = rows, columns, scoring
        ctx.mark_non_differentiable(lse)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
        add_gradients((grad_q, grad_k, grad_v), (out, lse), grad_out, q, k, v, *ctx.others)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None
