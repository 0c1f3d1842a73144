"""Which parameters decay, and an update against AdamW written out in float64."""

import math

import pytest
import torch
from torch import nn

from model import GPT, ModelConfig
from training.config import OptimizerConfig
from training.optimizer import build_optimizer, build_scaler, orthogonalise, parameter_groups
from training.runtime import Runtime

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 5}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_matrices_decay_and_vectors_do_not(tied, norm):
    model = GPT(ModelConfig(**SIZES, tied_head=tied, bias=True, norm=norm))
    decayed, kept = parameter_groups(model, OptimizerConfig(weight_decay=0.3))
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
    assert [len(group["params"]) for group in parameter_groups(model, OptimizerConfig())] == [1, 0]
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


def newton_schulz(matrix, n_iterations):
    """Jordan et al. 2024, written with the singular values: s becomes 3.4445 s - 4.775 s³ + 2.0315 s⁵."""
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(n_iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def test_an_orthogonal_update_by_singular_values():
    matrices = torch.randn(3, 4, 6, dtype=torch.float64)
    got = orthogonalise(matrices, 5)
    for one, matrix in zip(got, matrices, strict=True):
        torch.testing.assert_close(one, newton_schulz(matrix, 5), rtol=1e-5, atol=1e-5)
        assert ((torch.linalg.svdvals(one) > 0.6) & (torch.linalg.svdvals(one) < 1.3)).all()
    assert orthogonalise(matrices.float(), 5).dtype == torch.float32
    torch.testing.assert_close(orthogonalise(matrices.float(), 5).double(), got, rtol=0, atol=0.06)  # in bfloat16


def test_updates_equal_muon_by_hand():
    """Wide, tall and square matrices of the blocks, stacked by shape, against each alone; AdamW has all the others."""
    model = GPT(ModelConfig(**SIZES, tied_head=False, previous_embedding=True)).double()
    config = OptimizerConfig(name="muon", learning_rate=0.01, muon_learning_rate=0.03, weight_decay=0.25)
    optimizer = build_optimizer(model, config)
    others, muon = optimizer.param_groups
    matrices = {name: p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}
    assert {id(p) for p in muon["params"]} == {id(p) for p in matrices.values()}
    assert {tuple(p.shape) for p in matrices.values()} == {(8, 8), (32, 8), (8, 32)}
    assert {id(p) for p in others["params"]} == {id(p) for p in model.parameters()} - {id(p) for p in matrices.values()}
    assert (others["weight_decay"], others["lr_ratio"], muon["lr_ratio"]) == (0.0, 1.0, 3.0)
    expected = {name: p.detach().clone() for name, p in matrices.items()}
    mean = {name: torch.zeros_like(p) for name, p in expected.items()}
    for rate in (0.01, 0.004):
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_ratio"]
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for name, p in matrices.items():
            mean[name] = 0.95 * mean[name] + 0.05 * p.grad
            rows, columns = p.shape
            update = newton_schulz(0.05 * p.grad + 0.95 * mean[name], 5) * max(1, rows / columns) ** 0.5
            expected[name] = expected[name] * (1 - 3 * rate * 0.25) - 3 * rate * update
        optimizer.step()
    for name, p in matrices.items():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_of_other_groups_or_shapes_is_refused(name):
    """The message says what differs; a state goes to the parameter of its number."""
    one, other = (GPT(ModelConfig(**SIZES | {"n_embd": width})) for width in (8, 16))
    optimizers = [build_optimizer(model, OptimizerConfig(name=name)) for model in (one, other)]
    for model, optimizer in zip((one, other), optimizers, strict=True):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    with pytest.raises(ValueError, match=r"the checkpoint's .* is .*, the parameter"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    swapped = build_optimizer(one, OptimizerConfig(name="muon" if name == "adamw" else "adamw"))
    with pytest.raises(ValueError, match="groups of"):
        swapped.load_state_dict(optimizers[0].state_dict())


def test_the_state_is_laid_out_as_by_torch():
    """Checkpoints of AdamW from before this class existed go on."""
    model = GPT(ModelConfig(**SIZES))
    ours = build_optimizer(model, OptimizerConfig())
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in ours.param_groups]
    theirs = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99), fused=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    for p in model.parameters():
        assert {name: value.tolist() for name, value in ours.state[p].items()} == {
            name: value.tolist() for name, value in theirs.state[p].items()
        }


def test_only_float16_losses_are_scaled():
    cpu = torch.device("cpu")
    scalers = {dtype: build_scaler(Runtime(cpu, dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert [scaler.is_enabled() for scaler in scalers.values()] == [False, False, True]
    assert scalers[torch.float32].scale(torch.tensor(2.0)).item() == 2.0
    assert math.log2(scalers[torch.float16].scale(torch.tensor(1.0)).item()) > 0
