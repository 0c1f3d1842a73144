"""TrainState: all that the loop changes, so all that an exact resume needs."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from data.loader import BatchLoader
from data.prepare import Corpus
from model import GPT
from training.config import Config
from training.optimizer import Optimizer
from training.runtime import Runtime

_NUMBERS = ("step", "n_tokens", "seconds", "val_loss", "val_bits_per_byte", "best_val_loss")


@dataclass
class TrainState:
    """If it is not here, it is not resumed."""

    model: GPT
    optimizer: Optimizer
    loader: BatchLoader
    scaler: Any  # a torch.amp.GradScaler, which is typed for torch.optim alone
    runtime: Runtime
    step: int = 0
    n_tokens: int = 0
    seconds: float = 0.0  # of training steps alone: without start-up, validation and saving
    val_loss: float = math.nan
    val_bits_per_byte: float = math.nan
    best_val_loss: float = math.inf
    stop_signal: int = 0  # the signal that asked this process to stop; not kept

    def is_finite(self) -> bool:
        """Whether every parameter is a finite number; a finite loss may still lead to an update that overflows."""
        return all(bool(p.isfinite().all()) for p in self.model.parameters())

    def checkpoint(self, config: Config, corpus: Corpus, *, with_training: bool) -> dict[str, Any]:
        """What a checkpoint holds: plain types and tensors only, so that it loads without running code.

        Every process must call it: with_training collects their random streams.
        """
        content = {
            "config": config.to_dict(),
            "tokenizer": corpus.tokenizer.to_dict(),
            "data_fingerprint": corpus.fingerprint,
            "model": self.model.state_dict(),
            **{name: getattr(self, name) for name in _NUMBERS},
        }
        if with_training:
            content["training"] = {
                "optimizer": self.optimizer.state_dict(),
                "loader": self.loader.state_dict(),
                "scaler": self.scaler.state_dict(),
                "rng": self._gather_rng(),
            }
        return content

    def load(self, content: dict[str, Any]) -> None:
        """Takes up a checkpoint that was made with_training."""
        training = content["training"]
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(training["optimizer"])
        self.loader.load_state_dict(training["loader"])
        self.scaler.load_state_dict(training["scaler"])
        for name in _NUMBERS:
            setattr(self, name, type(getattr(self, name))(content[name]))
        if len(training["rng"]) == self.runtime.world_size:
            rng = training["rng"][self.runtime.rank]
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
