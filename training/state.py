"""TrainState: all that the loop changes, so all that an exact resume needs."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from data.loader import BatchLoader
from model import GPT
from training.runtime import Runtime


@dataclass
class TrainState:
    """If it is not here, it is not resumed."""

    model: GPT
    optimizer: torch.optim.Optimizer
    loader: BatchLoader
    scaler: torch.amp.GradScaler
    runtime: Runtime
    step: int = 0
    n_tokens: int = 0
    best_val_loss: float = math.inf
    val_loss: float = math.nan

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors only, so that it loads without unpickling code. All processes must call it."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "n_tokens": self.n_tokens,
            "best_val_loss": self.best_val_loss,
            "val_loss": self.val_loss,
            "rng": self._gather_rng(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The parameters themselves are loaded with the model (training/checkpoint.py)."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.n_tokens = state["n_tokens"]
        self.best_val_loss = state["best_val_loss"]
        self.val_loss = state["val_loss"]
        if len(state["rng"]) == self.runtime.world_size:
            rng = state["rng"][self.runtime.rank]
            torch.set_rng_state(rng["cpu"])
            if "cuda" in rng and self.runtime.device.type == "cuda":
                torch.cuda.set_rng_state(rng["cuda"])

    def _gather_rng(self) -> list[dict[str, torch.Tensor]]:
        """The state of torch's generators in each process, by rank."""
        rng = {"cpu": torch.get_rng_state()}
        if self.runtime.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        if self.runtime.world_size == 1:
            return [rng]
        gathered: list[Any] = [None] * self.runtime.world_size
        dist.all_gather_object(gathered, rng)
        return gathered
