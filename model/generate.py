"""Sampling: filter the next-token distribution, draw, append, repeat."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from model.config import SamplingConfig
from model.decode import decoder_for
from model.gpt import GPT


def filter_logits(logits: Tensor, config: SamplingConfig) -> Tensor:
    """(B, V) -> (B, V): -inf for the tokens that must not be drawn. At least one token of each row stays."""
    if config.temperature > 0:
        logits = logits / max(config.temperature, 1e-30)  # below, float32 would divide by zero; this is argmax already
    if 0 < config.top_k < logits.shape[-1]:
        kth = logits.topk(config.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if config.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        # A token goes when those before it already reach p; the first one never goes.
        reached = probabilities.cumsum(-1) - probabilities >= config.top_p
        reached[:, 0] = False  # also where p is too small for float32
        logits = logits.masked_fill(reached.scatter(-1, order, reached), -math.inf)
    if config.min_p > 0:
        probabilities = logits.softmax(-1)
        floor = config.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < floor, -math.inf)
    return logits


def draw(logits: Tensor, config: SamplingConfig, generator: torch.Generator | None = None) -> Tensor:
    """(B, V) logits -> (B,) token ids."""
    if config.temperature == 0:
        return logits.argmax(-1)
    probabilities = filter_logits(logits.float(), config).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def context_start(n_tokens: int, block_size: int) -> int:
    """Where the context of the next token begins, after n_tokens.

    A full context is cut to its newer half, and then grows again: with a cache that costs one pass over half a
    context every half context, and the policy depends on n_tokens alone, so that decoding with and without a cache
    sees the same context.
    """
    if n_tokens <= block_size:
        return 0
    step = max(1, block_size // 2)
    return -(-(n_tokens - block_size) // step) * step


def generate(
    model: GPT,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    n_valid_tokens: int,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Yields max_new_tokens times the next token of each row, (B,).

    tokens (B, T) int64 with T ≥ 1. Ids from n_valid_tokens on are rows that pad the vocabulary; they are never drawn.
    """
    if tokens.shape[1] == 0:
        raise ValueError("the prompt has no tokens; at least one is needed to continue from")
    start, cache, decoder = -1, None, None
    for _ in range(max_new_tokens):
        new_start = context_start(tokens.shape[1], model.config.block_size)
        with torch.inference_mode():
            if cache is None or new_start != start:
                start, cache = new_start, model.new_cache() if use_cache else None
                logits = model(tokens[:, start:], cache=cache)[:, -1]  # (B, V)
            elif decoder := decoder or decoder_for(model, len(tokens)):
                logits = decoder(tokens[:, -1], cache)
            else:
                logits = model(tokens[:, -1:], cache=cache)[:, -1]
        next_token = draw(logits[:, :n_valid_tokens], sampling, generator)
        yield next_token
        tokens = torch.cat((tokens, next_token[:, None]), dim=1)
