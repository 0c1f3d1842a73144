"""Local window and global tokens (Longformer, Beltagy et al. 2020): each row sees its nearest w keys and the first g.

O(n·(w + g)) time and memory. The sequence is cut into blocks of w queries; a block needs the keys of its own block, of
the one before, and the globals. All blocks but the first few look alike, so one small mask serves them all and the
fused kernel takes them as one batch.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.mask import MaskRule
from model.attention.path import AttentionPath, query_positions


class WindowAttention(AttentionPath):
    """window, n_global: the rule followed when the MaskRule names no window of its own. Causal only."""

    supports = frozenset({"window", "globals", "cache", "backward_cpu", "backward_cuda", "log_sum_exp"})

    def __init__(self, *, window: int = 256, n_global: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.own_rule = MaskRule(window=window, n_global=n_global)

    def rule_for(self, rule: MaskRule) -> MaskRule:
        if rule.window is not None:
            return rule
        return replace(rule, window=self.own_rule.window, n_global=max(rule.n_global, self.own_rule.n_global))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        rule = self.rule_for(rule)
        n_queries, n_keys = q.shape[2], k.shape[2]
        window = rule.window or n_keys
        if n_keys > n_queries:
            # Only the keys that the first of these queries can still see, the globals first.
            kept = torch.arange(n_keys, device=q.device)
            kept = kept[(kept < rule.n_global) | (kept > n_keys - n_queries - window)]
            return self._direct(q, k[:, :, kept], v[:, :, kept], rule, query_positions(q, k), kept)
        # Rows of the head are few, and their blocks are unlike the others: globals lie among their local keys.
        n_head_rows = min(n_queries, (-(-rule.n_global // window) + 1) * window)
        positions = torch.arange(n_head_rows, device=q.device)
        head_q, head_k, head_v = (part[:, :, :n_head_rows] for part in (q, k, v))
        out = self._direct(head_q, head_k, head_v, rule, positions, positions)
        if n_head_rows == n_queries:
            return out
        return torch.cat((out, self._blocks(q, k, v, rule, window, n_head_rows)), dim=2)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, window: int, start: int) -> Tensor:
        """Rows from `start` (a multiple of window, at least window + n_global) on, in blocks of `window`."""
        batch, n_queries = q.shape[0], q.shape[2]
        n_blocks = -(-(n_queries - start) // window)
        n_padding = start + n_blocks * window - n_queries  # after the last row, where no earlier row sees it

        def as_blocks(x: Tensor) -> Tensor:
            """(B, H, …, D) -> (B·N, H, w, D)"""
            x = F.pad(x[:, :, start:], (0, 0, 0, n_padding))
            return x.unflatten(2, (n_blocks, window)).transpose(1, 2).flatten(0, 1)

        def as_neighbourhoods(x: Tensor) -> Tensor:
            """(B, G, S, D) -> (B·N, G, g + 2w, D): the globals, the block before, the block itself"""
            local = F.pad(x[:, :, start - window :], (0, 0, 0, n_padding)).unfold(2, 2 * window, window)
            local = local.permute(0, 2, 1, 4, 3)  # (B, N, G, 2w, D)
            first = x[:, None, :, : rule.n_global].expand(-1, n_blocks, -1, -1, -1)
            return torch.cat((first, local), dim=3).flatten(0, 1)

        rows = torch.arange(start, start + window, device=q.device)
        columns = torch.arange(start - window, start + window, device=q.device)
        columns = torch.cat((torch.arange(rule.n_global, device=q.device), columns))
        out = self._direct(as_blocks(q), as_neighbourhoods(k), as_neighbourhoods(v), rule, rows, columns)
        return out.unflatten(0, (batch, n_blocks)).transpose(1, 2).flatten(2, 3)[:, :, : n_queries - start]

    def _direct(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, rows: Tensor, columns: Tensor) -> Tensor:
        """The fused kernel under the rule's mask for these positions."""
        grouped = q.shape[1] != k.shape[1]
        mask = rule.allowed(rows, columns)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=grouped)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule, cache: Any) -> Tensor:
        """Keeps only the globals and the last window - 1 keys between calls."""
        rule = self.rule_for(rule)
        n_before = cache.n_seen
        k, v = cache.append(k, v)
        if n_before == 0:
            out = self(q, k, v, rule=rule)
        else:
            columns = cache.positions(q.device)
            out = self._direct(q, k, v, rule, columns[-q.shape[2] :], columns)
        cache.keep(rule.n_global, (rule.window or 1) - 1)
        return out
