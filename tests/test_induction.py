"""Induction at small size: a previous-token head and induction heads form, and they carry the gain from the context."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from model import GPT, ModelConfig
from model.gpt import next_token_loss
from probes.causal.effects import ablation_losses
from probes.scores import repeated_tokens, score_heads

N_VOCABULARY, N_TOKENS, N_STEPS = 32, 24, 300


def repeats(generator):
    """Sequences of 4 to 12 random tokens, each four times, one after the other."""
    periods = torch.randint(4, 13, (5000,), generator=generator).tolist()
    return torch.cat([torch.randint(N_VOCABULARY, (n,), generator=generator).repeat(4) for n in periods])


@pytest.fixture(scope="module")
def trained():
    """Two layers of attention and nothing else, after N_STEPS steps; about six seconds."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"n_layer": 2, "n_head": 8, "n_embd": 64, "block_size": N_TOKENS, "vocab_size": N_VOCABULARY}
    parts = {"mlp": "none", "position": "alibi", "attention": "reference", "bias": True, "tied_head": False}
    model = GPT(ModelConfig(**sizes, **parts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    stream, places = repeats(generator), torch.arange(N_TOKENS + 1)
    for _ in range(N_STEPS):
        windows = stream[torch.randint(len(stream) - N_TOKENS, (64, 1), generator=generator) + places]
        next_token_loss(model(windows[:, :-1]), windows[:, 1:]).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def roles(trained):
    """The previous-token head of layer 0, the induction heads of layer 1, and the others."""
    scores, _ = score_heads(trained, n_draws=1)
    previous = max((head for head in scores if head.layer == 0), key=lambda head: scores[head]["previous"])
    induction = [head for head in scores if scores[head].get("induction", 0) >= 0.4]
    assert scores[previous]["previous"] > 0.25
    assert max(scores[head]["induction"] for head in induction) > 0.55
    assert {head.layer for head in induction} == {1}
    return previous, induction, [head for head in scores if head not in (previous, *induction)]


def test_the_heads_that_the_scores_name_carry_the_gain_from_the_context(trained, roles):
    """Measured (seeds 0, 1, 2): of a gain of 2.9 to 3.1 nats the previous-token head carries all, the induction
    heads 2.7 to 3.0 together, and no other head more than 0.2."""
    previous, induction, others = roles
    twice = torch.stack([repeated_tokens(trained.config, 2, seed=100 + draw) for draw in range(64)])
    length = twice.shape[1] // 2
    (first,) = ablation_losses(trained, twice, [], counted=slice(length - 1))
    groups = [[previous], induction, *([head] for head in others)]
    second, *without = ablation_losses(trained, twice, groups, counted=slice(length, None))
    gain = first - second
    assert gain > 2.3
    assert without[0] - second > 0.8 * gain
    assert without[1] - second > 0.7 * gain
    assert max(without[2:]) - second < 0.2 * gain


def test_before_training_there_is_neither_head_nor_gain():
    torch.manual_seed(0)
    config = ModelConfig(n_layer=2, n_head=8, n_embd=64, block_size=N_TOKENS, vocab_size=N_VOCABULARY, mlp="none")
    model = GPT(config).eval()
    scores, _ = score_heads(model, n_draws=1)
    assert max(head.get("induction", 0) for head in scores.values()) < 0.2
    twice = torch.stack([repeated_tokens(config, 2, seed=draw) for draw in range(16)])
    (first,), (second,) = (ablation_losses(model, twice, [], counted=part) for part in (slice(11), slice(12, None)))
    assert abs(first - second) < 0.1
