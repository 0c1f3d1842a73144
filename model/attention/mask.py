"""Which pairs of positions may meet: a rule, not a matrix."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskRule:
    """Says for any query position i and key position j whether i may see j.

    The rule is evaluated for the block of rows and columns that is asked for, so that only the reference path ever
    holds an n×n mask.

    causal     i sees j only when j <= i.
    window     i sees the nearest `window` keys, itself included: with `causal`, row i sees exactly min(i + 1, window)
               keys; without, |i - j| < window. None: no limit.
    n_global   the first `n_global` positions are exempt from the window: every row sees them and they see every row
               (Longformer, Beltagy et al. 2020, section 3.1). The causal rule still holds for them.
    documents  (B, S) integer ids: only positions of the same document see each other. None: one document.
    """

    causal: bool = True
    window: int | None = None
    n_global: int = 0
    documents: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(f"window is {self.window}; it must be a whole number from 1 (a row sees itself)")
        if self.n_global < 0:
            raise ValueError(f"n_global is {self.n_global}; it must be 0 or more")

    def words(self) -> set[str]:
        """The capabilities that a path needs to follow this rule."""
        needed = {
            "bidirectional": not self.causal,
            "window": self.window is not None,
            "globals": self.window is not None and self.n_global > 0,
            "documents": self.documents is not None,
        }
        return {word for word, is_needed in needed.items() if is_needed}

    def allows_any(self, rows: range, columns: range) -> bool:
        """False only when no pair of the block is allowed, so that a path can leave it out. Documents are not asked."""
        if self.causal and columns.start > rows[-1]:
            return False
        if self.window is None or min(rows.start, columns.start) < self.n_global:
            return True
        return max(rows.start - columns[-1], columns.start - rows[-1]) < self.window

    def allows_all(self, rows: range, columns: range) -> bool:
        """True only when every pair of the block is allowed, so that a path need not look at each."""
        if self.documents is not None or (self.causal and columns[-1] > rows.start):
            return False
        return self.window is None or max(rows[-1] - columns.start, columns[-1] - rows.start) < self.window

    def allowed(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Booleans for a block: rows (R,) and columns (C,) are positions; returns (R, C), or (B, 1, R, C) with
        documents."""
        i, j = rows[:, None], columns[None, :]  # (R, 1), (1, C)
        seen = torch.ones(len(rows), len(columns), dtype=torch.bool, device=rows.device)
        if self.window is not None:
            is_global = (i < self.n_global) | (j < self.n_global)
            seen &= ((i - j).abs() < self.window) | is_global
        if self.causal:
            seen &= j <= i
        if self.documents is not None:
            same = self.documents[:, rows, None] == self.documents[:, None, columns]  # (B, R, C)
            seen = (seen & same).unsqueeze(1)
        return seen
