"""What decoding remembers, so that a new token costs one row of attention and not the whole matrix again."""

from typing import Any

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, (B, G, S, D); or, for a path that sums them up, its running `state`.

    Memory grows by doubling up to `capacity` positions. `n_seen` have passed; a path with a window keeps fewer.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.n_seen = 0
        self.n_kept = 0
        self.n_first = 0  # of the kept positions, so many are the first of all; the others are the latest
        self.state: Any = None
        self._buffers: list[Tensor] = []  # keys and values

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds T new positions, (B, G, T, D); returns all that is kept, (B, G, S, D)."""
        start, end = self.n_kept, self.n_kept + k.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        if not self._buffers or end > self._buffers[0].shape[2]:
            size = min(self.capacity, max(end, 2 * start))
            grown = [new.new_empty(*new.shape[:2], size, new.shape[3]) for new in (k, v)]
            for buffer, old in zip(grown, self._buffers, strict=False):
                buffer[:, :, :start] = old[:, :, :start]
            self._buffers = grown
        keys, values = self._buffers
        keys.narrow(2, start, end - start).copy_(k)
        values.narrow(2, start, end - start).copy_(v)
        self.n_seen += k.shape[2]
        self.n_kept = end
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def keep(self, n_first: int, n_last: int) -> None:
        """Forgets all but the first n_first positions of the context and the latest n_last, and frees their memory."""
        if self.n_kept > n_first + n_last:
            latest = slice(self.n_kept - n_last, self.n_kept)
            self._buffers = [torch.cat((old[:, :, :n_first], old[:, :, latest]), dim=2) for old in self._buffers]
            self.n_first, self.n_kept = n_first, n_first + n_last

    def positions(self, device: torch.device) -> Tensor:
        """(S,): where the kept keys stand in the context."""
        n_last = self.n_kept - self.n_first
        first, latest = torch.arange(self.n_first), torch.arange(self.n_seen - n_last, self.n_seen)
        return torch.cat((first, latest)).to(device)


class DecodingCache:
    """One LayerCache a layer. `n_tokens` have been seen; `last_token` (B, 1) is kept where the model asks for it."""

    def __init__(self, n_layer: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(n_layer)]
        self.n_tokens = 0
        self.last_token: Tensor | None = None
