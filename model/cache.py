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
        self._buffer: Tensor | None = None  # (B, 2·G, S, D): keys, then values

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds T new positions, (B, G, T, D); returns all that is kept, (B, G, S, D), in the number type of the new."""
        return self.extend(torch.cat((k, v), dim=1))

    def extend(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """`append` of keys and values that lie one after the other, (B, 2·G, T, D)."""
        start, end, buffer = self.n_kept, self.n_kept + kv.shape[2], self._buffer
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        if buffer is None or end > buffer.shape[2] or kv.dtype != buffer.dtype:
            size = min(self.capacity, max(end, 2 * start))
            grown = kv.new_empty(*kv.shape[:2], size, kv.shape[3])
            if buffer is not None:
                grown[:, :, :start] = buffer[:, :, :start]
            buffer = self._buffer = grown
        buffer[:, :, start:end] = kv
        self.n_seen += kv.shape[2]
        self.n_kept = end
        keys, values = buffer[:, :, :end].chunk(2, dim=1)
        return keys, values

    def keep(self, n_first: int, n_last: int) -> None:
        """Forgets all but the first n_first positions of the context and the latest n_last, and frees their memory."""
        if self._buffer is not None and self.n_kept > n_first + n_last:
            latest = slice(self.n_kept - n_last, self.n_kept)
            self._buffer = torch.cat((self._buffer[:, :, :n_first], self._buffer[:, :, latest]), dim=2)
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
