"""The validation loss against sums written out in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import training.evaluate
from model import GPT, ModelConfig
from model.gpt import next_token_loss
from training.evaluate import evaluate
from training.runtime import Runtime

FLOAT32 = Runtime(torch.device("cpu"), torch.float32)
BLOCK = 8


def by_hand(model: nn.Module, tokens: np.ndarray) -> list[float]:
    """Nats of each target, window after window, a window a call."""
    nats = []
    for start in range(0, len(tokens) - 1, BLOCK):
        window = [int(t) for t in tokens[start : start + BLOCK + 1]]
        logits = model(torch.tensor([window[:-1]]))[0].double()
        for row, target in zip(logits.tolist(), window[1:], strict=True):
            largest = max(row)
            nats.append(largest + math.log(sum(math.exp(x - largest) for x in row)) - row[target])
    return nats


@pytest.fixture
def model():
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=BLOCK, vocab_size=7, dropout=0.5)).double()
    for p in model.parameters():
        nn.init.normal_(p)  # far from the uniform guess of a new model
    return model


@pytest.mark.parametrize("n_targets", [1, 3, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 6])
@pytest.mark.parametrize("tokens_at_once", [1, 2 * BLOCK, 16_384])
def test_loss_and_bits_per_byte_against_a_sum_by_hand(model, monkeypatch, n_targets, tokens_at_once):
    monkeypatch.setattr(training.evaluate, "_TOKENS_AT_ONCE", tokens_at_once)
    tokens = np.random.default_rng(0).integers(0, 7, n_targets + 1).astype(np.uint16)
    nats = by_hand(model.eval(), tokens)
    assert len(nats) == n_targets
    got = evaluate(model, tokens, block_size=BLOCK, n_bytes=3 * n_targets, runtime=FLOAT32)
    assert got.loss == pytest.approx(sum(nats) / n_targets, rel=1e-9)
    assert got.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / (3 * n_targets), rel=1e-9)


def test_a_uniform_guess_costs_the_logarithm_of_the_vocabulary():
    class Uniform(nn.Module):
        def forward(self, tokens, positions):  # noqa: ARG002
            return torch.zeros(*tokens.shape, 32)

    got = evaluate(Uniform(), np.zeros(22, np.uint16), block_size=4, n_bytes=21, runtime=FLOAT32)
    assert got.loss == pytest.approx(math.log(32), rel=1e-6)
    assert got.bits_per_byte == pytest.approx(5.0, rel=1e-6)


def test_no_random_number_is_drawn_no_gradient_kept_and_the_mode_stays(model):
    tokens = np.arange(30, dtype=np.uint16) % 7
    before = torch.get_rng_state()
    losses = set()
    for mode in (True, False, True):
        model.train(mode)
        losses.add(evaluate(model, tokens, block_size=BLOCK, n_bytes=29, runtime=FLOAT32).loss)
        assert model.training is mode
    assert len(losses) == 1  # without dropout, whatever the mode
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_bfloat16_validates_near_float32(model):
    tokens = np.arange(100, dtype=np.uint16) ** 2 % 7
    bfloat16 = Runtime(torch.device("cpu"), torch.bfloat16)
    exact, rounded = (
        evaluate(model.float(), tokens, block_size=BLOCK, n_bytes=99, runtime=runtime).loss
        for runtime in (FLOAT32, bfloat16)
    )
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)


def test_next_token_loss_is_the_mean_over_all_targets():
    logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0]]])
    loss = next_token_loss(logits, torch.tensor([[0, 1]]))
    assert loss.item() == pytest.approx((math.log(2) + math.log(4)) / 2)
