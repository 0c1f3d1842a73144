"""The four stages of attention, each written out: scores, mask, softmax, weighted sum. The oracle of all paths."""

from torch import Tensor
from torch.nn import functional as F

from model.attention.mask import MaskRule
from model.attention.path import AttentionPath, repeat_groups


class ReferenceAttention(AttentionPath):
    """Materialises the (T, S) matrix of weights: O(n²) memory, every rule and option, any dtype."""

    supports = frozenset(
        {
            "window",
            "globals",
            "documents",
            "bidirectional",
            "dropout",
            "softcap",
            "alibi",
            "cache",
            "backward_cpu",
            "backward_cuda",
            "log_sum_exp",
        }
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        weights = self.weights(q, k, rule=rule)  # (B, H, T, S)
        weights = F.dropout(weights, self.dropout, self.training)
        out = weights @ repeat_groups(v, q.shape[1]).to(weights.dtype)  # (B, H, T, D)
        return out.to(q.dtype)
