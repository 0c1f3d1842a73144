"""What the paths `tiled` and `ring` have in common: options, capabilities, and one pass that gives both results."""

from typing import Any

from torch import Tensor

from model.attention.mask import MaskRule
from model.attention.path import AttentionPath


class BlockwiseAttention(AttentionPath):
    """block: queries and keys in a tile. Every rule and option but dropout, any dtype, computed in at least float32."""

    supports = frozenset(
        {"window", "globals", "documents", "bidirectional", "softcap", "alibi", "cache", "backward_cpu"}
        | {"backward_cuda", "log_sum_exp"}
    )

    def __init__(self, *, block: int = 256, **options: Any) -> None:
        super().__init__(**options)
        if block < 1:
            raise ValueError(f"block is {block}; a tile needs at least 1 query and key")
        self.block = block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        return self.attend(q, k, v, rule)[0]

    def log_sum_exp(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> Tensor:
        return self.attend(q, k, k, rule)[1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
        """out (B, H, T, D) and log-sum-exp (B, H, T)."""
        raise NotImplementedError
