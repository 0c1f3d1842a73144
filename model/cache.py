"""What decoding remembers, so that a new token costs one row of attention and not the whole matrix again."""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, (B, G, S, D), in memory that is taken once for `capacity` positions."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds T new positions, (B, G, T, D); returns all that is remembered, (B, G, S, D)."""
        end = self.length + k.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        if self.k is None or self.v is None:
            batch, groups, _, dim = k.shape
            self.k = k.new_empty(batch, groups, self.capacity, dim)
            self.v = torch.empty_like(self.k)
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class DecodingCache:
    """One LayerCache a layer. `n_tokens` have been seen."""

    def __init__(self, n_layer: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(n_layer)]
        self.n_tokens = 0
