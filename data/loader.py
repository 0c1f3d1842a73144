"""Batches of token ids, drawn so that any number of processes sees together what one alone would see."""

from typing import Any

import numpy as np
import torch

from data.config import Order


class BatchLoader:
    """Draws the inputs and targets of training steps from a 1-D array of tokens.

    random: windows of block_size + 1 tokens, uniform over all starts. sequential: the tokens as an endless ring, on
    which a step moves on by batch_size * block_size targets, so any len(tokens) targets in a row are each token once.
    """

    def __init__(
        self,
        tokens: np.ndarray[Any, Any],
        *,
        block_size: int,
        batch_size: int,
        order: Order,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """`batch_size` counts the sequences of all processes together; each gets batch_size // world_size of them.

        ValueError when the sizes do not fit each other or the tokens.
        """
        if order not in ("random", "sequential"):
            raise ValueError(f"order is {order!r}; choose from random, sequential")
        if block_size < 1 or batch_size < 1:
            raise ValueError(f"block_size {block_size} and batch_size {batch_size} must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside 0 … {world_size - 1}")
        if batch_size % world_size:
            raise ValueError(
                f"batch_size {batch_size} does not divide among {world_size} processes "
                f"({batch_size} = {world_size} × {batch_size // world_size} + {batch_size % world_size})"
            )
        if len(tokens) < block_size + 1:
            raise ValueError(f"block_size {block_size} needs {block_size + 1} tokens, but there are {len(tokens)}")
        self._tokens = np.asarray(tokens)
        self._block_size, self._batch_size, self._order = block_size, batch_size, order
        n_local = batch_size // world_size
        self._mine = slice(rank * n_local, (rank + 1) * n_local)
        self._offsets = np.arange(block_size + 1)
        self._position = 0
        self._generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each (batch_size // world_size, block_size) int64, the targets one token later."""
        starts = self._next_starts()[self._mine]
        windows = self._tokens.take(starts[:, None] + self._offsets, mode="wrap")
        return torch.from_numpy(windows[:, :-1].astype(np.int64)), torch.from_numpy(windows[:, 1:].astype(np.int64))

    def _next_starts(self) -> np.ndarray[Any, Any]:
        """Where the windows of the whole batch start, for all processes."""
        n_tokens = len(self._tokens)
        if self._order == "random":
            n_starts = n_tokens - self._block_size
            return torch.randint(n_starts, (self._batch_size,), generator=self._generator).numpy()
        starts = (self._position + self._block_size * np.arange(self._batch_size)) % n_tokens
        self._position = (self._position + self._block_size * self._batch_size) % n_tokens
        return starts

    def state_dict(self) -> dict[str, Any]:
        """Everything that the coming batches depend on, as plain types and one tensor. The same on every rank."""
        return {"position": self._position, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the loader of `state` stood. ValueError for a state that does not fit the tokens."""
        position = state["position"]
        if not 0 <= position < len(self._tokens):
            raise ValueError(f"loader position {position} is outside the {len(self._tokens)} tokens: another corpus?")
        self._generator.set_state(state["generator"])
        self._position = position
