"""PyTorch's fused kernels: the same sum computed in blocks that stay in cache, O(n) memory (Dao et al. 2022)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention.mask import MaskRule
from model.attention.path import AttentionPath, query_positions

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

# The CPU kernel computes the log-sum-exp for its own backward pass and returns it beside the output.
_CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class KernelLogSumExp(TorchDispatchMode):
    """While it lasts, `take` gives the log-sum-exp (B, H, T) that the CPU kernel computed when it last ran; once."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is _CPU_KERNEL:
            self._last = result[1]
        return result

    def take(self) -> Tensor | None:
        last, self._last = self._last, None
        return last


class FlashAttention(AttentionPath):
    """scaled_dot_product_attention; the method `kernel` says which of PyTorch's implementations runs.

    kernel: auto leaves the choice to PyTorch; one of KERNELS runs or is refused.
    Grouped heads are not copied. Dropout on the weights makes PyTorch leave the fused kernel on CPU.
    """

    supports = frozenset({"bidirectional", "dropout", "cache", "backward_cpu", "backward_cuda", "log_sum_exp"})

    def __init__(self, *, kernel: str = "auto", **options: Any) -> None:
        super().__init__(**options)
        if kernel != "auto" and kernel not in KERNELS:
            raise ValueError(f"flash kernel is {kernel!r}; choose one of: auto, {', '.join(KERNELS)}")
        self.pinned = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        arguments = self._arguments(q, k, v, rule)
        if self.pinned == "auto":
            return F.scaled_dot_product_attention(**arguments).to(q.dtype)
        self._check_pinned(arguments)
        with sdpa_kernel(KERNELS[self.pinned]):
            return F.scaled_dot_product_attention(**arguments).to(q.dtype)

    def log_sum_exp(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> Tensor:
        if q.device.type != "cpu":
            return super().log_sum_exp(q, k, rule=rule)
        mask, is_causal = _mask(q, k, rule)
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        _, lse = _CPU_KERNEL(q, k, k, 0.0, is_causal, attn_mask=mask, scale=self.scale)
        return lse

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> str:
        arguments = self._arguments(q, k, v, rule)
        if self.pinned != "auto":
            self._check_pinned(arguments)
            return f"{q.device.type} {KERNELS[self.pinned].name.lower()}"
        choice = torch._fused_sdp_choice(**arguments)
        return f"{q.device.type} {SDPBackend(choice).name.lower()}"

    def _check_pinned(self, arguments: dict[str, Any]) -> None:
        """ValueError, naming the kernels that do, when the pinned one does not run for these inputs."""
        if not _runs(self.pinned, arguments):
            q, there = arguments["query"], [name for name in KERNELS if _runs(name, arguments)]
            raise ValueError(
                f"PyTorch's {self.pinned} attention kernel does not run here ({q.device.type}, {q.dtype}, head_dim "
                f"{q.shape[-1]}); model.flash_kernel could be: auto, {', '.join(there)}"
            )

    def _arguments(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> dict[str, Any]:
        if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[-1] < 64:
            # Small heads: the CPU kernel's bfloat16 backward pass takes 2 to 3 times as long as its float32 one.
            q, k, v = q.float(), k.float(), v.float()
        mask, is_causal = _mask(q, k, rule)
        return {
            "query": q,
            "key": k,
            "value": v,
            "attn_mask": mask,
            "dropout_p": self.dropout if self.training else 0.0,
            "is_causal": is_causal,
            "scale": self.scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }


def _mask(q: Tensor, k: Tensor, rule: MaskRule) -> tuple[Tensor | None, bool]:
    """(mask, is_causal) for the kernel. Only a prompt that continues a cache needs an explicit (T, S) mask: PyTorch's
    is_causal aligns the first query with the first key, ours are the last T of S."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    if not rule.causal or n_queries == 1:
        return None, False
    if n_queries == n_keys:
        return None, True
    return rule.allowed(query_positions(q, k), torch.arange(n_keys, device=q.device)), False


def _runs(pinned: str, arguments: dict[str, Any]) -> bool:
    """Does PyTorch choose the kernel `pinned` for these inputs when it is the only one allowed?"""
    try:
        with sdpa_kernel(KERNELS[pinned]):
            return SDPBackend(torch._fused_sdp_choice(**arguments)) == KERNELS[pinned]
    except RuntimeError:  # no kernel is left
        return False
