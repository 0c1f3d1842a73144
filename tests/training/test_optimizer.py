"""Which parameters decay, and an update against AdamW written out in float64."""

import math

import pytest
import torch
from torch import nn

from model import GPT, ModelConfig
from training.config import OptimizerConfig
from training.optimizer import build_optimizer, build_scaler, parameter_groups
from training.runtime import Runtime

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 5}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_matrices_decay_and_vectors_do_not(tied, norm):
    model = GPT(ModelConfig(**SIZES, tied_head=tied, bias=True, norm=norm))
    decayed, kept = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, vectors = ([names[id(p)] for p in group["params"]] for group in (decayed, kept))
    assert len(matrices) == len(set(matrices))
    assert len(vectors) == len(set(vectors))
    assert set(matrices) | set(vectors) == set(names.values())
    assert not set(matrices) & set(vectors)
    assert all("norm" in name or name.endswith("bias") for name in vectors)
    assert all(name.endswith("weight") and "norm" not in name for name in matrices)
    assert {"token_embedding.weight", "blocks.1.attn.q_proj.weight"} <= set(matrices)
    assert ("lm_head.weight" in matrices) is not tied  # tied, it goes by the embedding's name, once


def test_frozen_parameters_are_left_out():
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [1, 0]
    assert len(build_optimizer(model, OptimizerConfig()).param_groups) == 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_updates_equal_adamw_by_hand(dtype, tolerance):
    """Loshchilov & Hutter 2019, algorithm 2, with the moments' start corrected."""
    model = nn.Linear(3, 2).to(dtype)
    config = OptimizerConfig(beta1=0.8, beta2=0.95, weight_decay=0.25)
    optimizer = build_optimizer(model, config)
    generator = torch.Generator().manual_seed(3)
    expected = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    mean = {name: torch.zeros_like(p) for name, p in expected.items()}
    square = {name: torch.zeros_like(p) for name, p in expected.items()}
    for t, rate in enumerate([0.01, 0.02, 0.005], start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
            g = p.grad.double()
            mean[name] = 0.8 * mean[name] + 0.2 * g
            square[name] = 0.95 * square[name] + 0.05 * g * g
            step = mean[name] / (1 - 0.8**t) / ((square[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            decay = 0.25 if name == "weight" else 0.0
            expected[name] = expected[name] - rate * step - rate * decay * expected[name]
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=tolerance, atol=tolerance)


def test_only_float16_losses_are_scaled():
    cpu = torch.device("cpu")
    scalers = {dtype: build_scaler(Runtime(cpu, dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert [scaler.is_enabled() for scaler in scalers.values()] == [False, False, True]
    assert scalers[torch.float32].scale(torch.tensor(2.0)).item() == 2.0
    assert math.log2(scalers[torch.float16].scale(torch.tensor(1.0)).item()) > 0
