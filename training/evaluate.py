"""Validation: the same tokens every time, each predicted once."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from model.gpt import IGNORED, next_token_loss
from training.parallel import ALONE, Share
from training.runtime import Runtime

_TOKENS_AT_ONCE = 4_096


@dataclass(frozen=True)
class Evaluation:
    """loss in nats a token; bits a byte of the text, which compares across tokenizers."""

    loss: float
    bits_per_byte: float


@torch.no_grad()
def evaluate(
    model: nn.Module, tokens: np.ndarray, *, block_size: int, n_bytes: int, runtime: Runtime, share: Share = ALONE
) -> Evaluation:
    """Mean loss over all targets tokens[1:], in consecutive windows of block_size that each start afresh.

    n_bytes: length of the text of tokens[1:]. Draws no random numbers, so training is the same with and without it.
    """
    was_training = model.training
    model.eval()
    nats = 0.0
    for i, (inputs, targets) in enumerate(_windows(tokens, block_size)):
        if i % share.world_size != share.rank:
            continue
        x, y, positions = share.take(inputs.to(runtime.device), targets.to(runtime.device))
        with runtime.autocast():
            logits = model(x, positions=positions)
        if n_counted := int((y != IGNORED).sum()):
            nats += next_token_loss(logits, y).item() * n_counted
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
