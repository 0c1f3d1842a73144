"""Validation: the same tokens every time, each predicted once."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.runtime import Runtime

_TOKENS_AT_ONCE = 16_384


@dataclass(frozen=True)
class Evaluation:
    """loss in nats a token; bits a byte of the text, which compares across tokenizers."""

    loss: float
    bits_per_byte: float


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats: logits (B, T, V), targets (B, T) -> ()."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, tokens: np.ndarray, *, block_size: int, n_bytes: int, runtime: Runtime) -> Evaluation:
    """Mean loss over all targets tokens[1:], in consecutive windows of block_size that each start afresh.

    n_bytes: length of the text of tokens[1:]. Draws no random numbers, so training is the same with and without it.
    """
    was_training = model.training
    model.eval()
    nats = 0.0
    for i, (inputs, targets) in enumerate(_windows(tokens, block_size)):
        if i % runtime.world_size == runtime.rank:
            with runtime.autocast():
                logits = model(inputs.to(runtime.device))
            nats += next_token_loss(logits, targets.to(runtime.device)).item() * targets.numel()
    model.train(was_training)
    (nats,) = runtime.sum(nats)
    return Evaluation(loss=nats / (len(tokens) - 1), bits_per_byte=nats / math.log(2) / n_bytes)


def _windows(tokens: np.ndarray, block_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches (B, T) of inputs and targets; the last window may be shorter and is a batch of its own."""
    n_targets = len(tokens) - 1
    per_batch = max(1, _TOKENS_AT_ONCE // block_size) * block_size
    n_whole = n_targets - n_targets % block_size
    edges = [*range(0, n_whole, per_batch), n_whole, n_targets]
    for first, last in itertools.pairwise(edges):
        if first < last:
            part = torch.from_numpy(tokens[first : last + 1].astype(np.int64))
            width = min(block_size, last - first)
            yield part[:-1].view(-1, width), part[1:].view(-1, width)
