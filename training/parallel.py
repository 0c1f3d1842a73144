"""One model over several processes: what each computes, how gradients meet; and its compilation."""

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from data.loader import BatchLoader
from model import GPT, ModelConfig
from model.attention import build, require
from model.attention.ring import ring_positions
from model.gpt import IGNORED, next_token_loss
from model.multihead import build_path
from training.config import Config
from training.runtime import Runtime


@dataclass(frozen=True)
class Share:
    """What one process computes of each batch (B, T): process `rank` of `world_size` takes some of the sequences, or,
    as process ring_rank of a ring of ring_size, some of the positions of every sequence."""

    rank: int = 0
    world_size: int = 1
    ring_rank: int = 0
    ring_size: int = 1

    def take(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """inputs and targets (B, T) -> this process's positions of them, and which those are; None: all of them.

        A sequence that does not divide among the ring is padded with targets that no loss counts.
        """
        if self.ring_size == 1:
            return inputs, targets, None
        n_padding = -inputs.shape[1] % (2 * self.ring_size)
        inputs, targets = F.pad(inputs, (0, n_padding)), F.pad(targets, (0, n_padding), value=IGNORED)
        runs = ring_positions(inputs.shape[1], self.ring_rank, self.ring_size)
        positions = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        return inputs[:, positions], targets[:, positions], positions.to(inputs.device)


ALONE = Share()


def share_of(config: ModelConfig, runtime: Runtime) -> Share:
    """A model on the path ring divides the sequence among all processes, any other the batch.

    ValueError when only some layers are on the ring, or when the sequence does not divide.
    """
    if "ring" not in config.paths or runtime.world_size == 1:
        return Share(rank=runtime.rank, world_size=runtime.world_size)
    if set(config.paths) != {"ring"}:
        raise ValueError(
            f"model.attention {config.attention} under {runtime.world_size} processes: the other layers would see only "
            f"a part of the sequence; use ring for all layers, or one process"
        )
    if config.block_size % (2 * runtime.world_size):
        raise ValueError(
            f"model.block_size {config.block_size} / (2 · {runtime.world_size} processes) = "
            f"{config.block_size / (2 * runtime.world_size):g}: a ring needs a whole number; "
            f"try {-(-config.block_size // (2 * runtime.world_size)) * 2 * runtime.world_size}"
        )
    return Share(ring_rank=runtime.rank, ring_size=runtime.world_size)


def check_trains(config: ModelConfig, device: torch.device) -> None:
    """ValueError when a layer's path has no backward pass on this device; names the paths that do."""
    for name in config.paths:
        if device.type in ("cpu", "cuda"):
            require(build(name), {f"backward_{device.type}"})


def build_loader(config: Config, tokens: np.ndarray, share: Share) -> BatchLoader:
    """The sequences that this process takes of each global batch."""
    return BatchLoader(
        tokens,
        block_size=config.model.block_size,
        batch_size=config.train.batch_size,
        order=config.data.order,
        seed=config.run.seed,
        rank=share.rank,
        world_size=share.world_size,
    )


def wrap(model: nn.Module, runtime: Runtime) -> nn.Module:
    """Data parallel over all processes: each backward pass ends with the mean of everyone's gradients."""
    if runtime.world_size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[runtime.device] if runtime.device.type == "cuda" else None)


def fit_micro_batch(model: nn.Module, config: Config, share: Share, runtime: Runtime) -> int:
    """Sequences to compute at once: train.micro_batch_size, or, where that is 0 on a GPU, the largest part of the
    process's share whose forward and backward pass fit its memory, tried now. ValueError when not even one does."""
    largest = config.micro_batch_size(share.world_size)
    if config.train.micro_batch_size or runtime.device.type != "cuda":
        return largest
    for size in (n for n in range(largest, 0, -1) if largest % n == 0):
        if not runtime.max(not _fits(model, size, config.model.block_size, runtime)):  # all processes take the same
            return size
    raise ValueError(f"not even one sequence of {config.model.block_size} tokens fits the memory of {runtime.device}")


def _fits(model: nn.Module, n_sequences: int, n_tokens: int, runtime: Runtime) -> bool:
    """Beside the optimizer's moments. Draws no numbers of the run and leaves no gradients."""
    with torch.random.fork_rng(devices=[runtime.device] if runtime.device.type == "cuda" else []):
        try:
            tokens = torch.zeros(n_sequences, n_tokens, dtype=torch.int64, device=runtime.device)
            moments = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]
            with runtime.autocast():
                logits = model(tokens)
            next_token_loss(logits, tokens).backward()
            del moments
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    return True


def gradient_sync(model: nn.Module, is_last_micro_step: bool) -> AbstractContextManager:
    """Only the last micro-step's backward pass has to exchange gradients."""
    if isinstance(model, DistributedDataParallel) and not is_last_micro_step:
        return model.no_sync()
    return contextlib.nullcontext()


def compile_model(model: GPT, mode: str, runtime: Runtime) -> nn.Module:
    """torch.compile when `mode` is on, or auto on CUDA. Tried at once, on one token: where the machine cannot compile
    (no C++ compiler, no Triton) the model comes back as it is, with one line of notice."""
    if mode == "off" or (mode == "auto" and runtime.device.type != "cuda"):
        return model
    tokens = torch.zeros(2, min(8, model.config.block_size), dtype=torch.int64, device=runtime.device)
    # The trial must not move the random streams that dropout draws from, nor leave gradients.
    with torch.random.fork_rng(devices=[runtime.device] if runtime.device.type == "cuda" else []):
        try:
            compiled = cast(nn.Module, torch.compile(model))
            with runtime.autocast():
                logits = compiled(tokens)
            next_token_loss(logits, tokens).backward()
        except Exception as error:  # every backend fails in its own way
            reason = str(error).strip().splitlines() or [type(error).__name__]
            print(f"torch.compile does not work here, training uncompiled: {reason[0]}", file=sys.stderr)
            return model
        finally:
            model.zero_grad(set_to_none=True)
    return compiled


@contextlib.contextmanager
def on_this_process(model: GPT) -> Iterator[None]:
    """While it lasts no layer waits for other processes: those on the path ring, which would, are on tiled."""
    places = [f"blocks.{layer}.attn.path" for layer, name in enumerate(model.config.paths) if name == "ring"]
    paths = [model.get_submodule(place) for place in places]
    try:
        for place in places:
            model.set_submodule(place, build_path(model.config, "tiled"))
        yield
    finally:
        for place, path in zip(places, paths, strict=True):
            model.set_submodule(place, path)
