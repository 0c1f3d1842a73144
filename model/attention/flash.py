"""PyTorch's fused kernels: the same sum computed in blocks that stay in cache, O(n) memory (Dao et al. 2022)."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from model.attention.mask import MaskRule
from model.attention.path import AttentionPath, query_positions


class FlashAttention(AttentionPath):
    """scaled_dot_product_attention; `kernel` says which of PyTorch's implementations runs.

    Grouped heads are not copied. Dropout on the weights makes PyTorch leave the fused kernel on CPU.
    """

    supports = frozenset({"bidirectional", "dropout", "cache", "backward_cpu", "backward_cuda", "log_sum_exp"})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        dtype = q.dtype
        if q.device.type == "cpu" and dtype == torch.bfloat16 and q.shape[-1] < 64:
            # Small heads: the CPU kernel's bfloat16 backward pass takes 2 to 3 times as long as its float32 one.
            q, k, v = q.float(), k.float(), v.float()
        dropout = self.dropout if self.training else 0.0
        mask, is_causal = _mask(q, k, rule)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=self.scale, enable_gqa=grouped)
        return out.to(dtype)

    def log_sum_exp(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> Tensor:
        if q.device.type != "cpu":
            return super().log_sum_exp(q, k, rule=rule)
        mask, is_causal = _mask(q, k, rule)
        # The CPU kernel computes the log-sum-exp for its own backward pass; this operator is how to read it.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        _, lse = kernel(q, k, k, 0.0, is_causal, attn_mask=mask, scale=self.scale)
        return lse

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> str:
        dropout = self.dropout if self.training else 0.0
        mask, is_causal = _mask(q, k, rule)
        grouped = q.shape[1] != k.shape[1]
        choice = torch._fused_sdp_choice(q, k, v, mask, dropout, is_causal, scale=self.scale, enable_gqa=grouped)
        return f"{q.device.type} {SDPBackend(choice).name.lower()}"


def _mask(q: Tensor, k: Tensor, rule: MaskRule) -> tuple[Tensor | None, bool]:
    """(mask, is_causal) for the kernel. Only a prompt that continues a cache needs an explicit (T, S) mask: PyTorch's
    is_causal aligns the first query with the first key, ours are the last T of S."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    if not rule.causal or n_queries == 1:
        return None, False
    if n_queries == n_keys:
        return None, True
    return rule.allowed(query_positions(q, k), torch.arange(n_keys, device=q.device)), False
