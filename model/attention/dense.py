"""The explicit map as two batched matrix products, in the number type of q: for short contexts."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.mask import MaskRule
from model.attention.path import AttentionPath, query_positions, repeat_groups


class DenseAttention(AttentionPath):
    """What `reference` does in at least float32, in bfloat16 too. O(n²) memory; on CPU, in bfloat16 and up to some
    hundred tokens, 2 to 4 times as quick as the fused kernel, whose blocks are too small to fill the processor."""

    supports = frozenset(
        {"window", "globals", "bidirectional", "dropout", "cache", "backward_cpu", "backward_cuda", "log_sum_exp"}
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        k, v = (repeat_groups(part, q.shape[1]).flatten(0, 1) for part in (k, v))  # (B·H, S, D)
        allowed = rule.allowed(query_positions(q, k), torch.arange(k.shape[1], device=q.device))  # (T, S)
        mask = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill(~allowed, -math.inf)
        scores = torch.baddbmm(mask, q.flatten(0, 1), k.mT, alpha=self.scale_for(q))  # (B·H, T, S)
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return (weights @ v).view(q.shape)
