"""The MLP kinds against their formulas. (The block's two placements of the norm: test_claims.py, claim 9.)"""

import math

import pytest
import torch

from model import ModelConfig
from model.block import MLP, Block


def gelu_tanh(x):
    """Hendrycks & Gimpel 2016, the approximation that GPT-2 uses."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "gelu": lambda x, up, _, down: gelu_tanh(x @ up.T) @ down.T,
    "relu2": lambda x, up, _, down: (x @ up.T).clamp(min=0) ** 2 @ down.T,
    "swiglu": lambda x, up, gate, down: ((x @ gate.T) / (1 + torch.exp(-x @ gate.T)) * (x @ up.T)) @ down.T,
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_mlp_formula(kind):
    mlp = MLP(ModelConfig(n_embd=8, n_head=2, mlp=kind)).double()
    x = 2 * torch.randn(3, 8, dtype=torch.float64)
    gate = mlp.gate_proj.weight if kind == "swiglu" else None
    expected = FORMULAS[kind](x, mlp.up_proj.weight, gate, mlp.down_proj.weight)
    torch.testing.assert_close(mlp(x), expected)


def test_swiglu_costs_about_what_the_others_do():
    """Three matrices of 8/3·C against two of 4·C, rounded up to a multiple of 8."""
    for n_embd in (64, 128, 384, 768):
        plain, gated = (
            sum(p.numel() for p in MLP(ModelConfig(n_embd=n_embd, n_head=2, mlp=mlp)).parameters())
            for mlp in ("gelu", "swiglu")
        )
        assert 0 <= gated - plain <= 3 * 8 * n_embd


def test_attention_only_block():
    block = Block(ModelConfig(n_embd=8, n_head=2, mlp="none"), 0)
    x, positions = torch.randn(1, 5, 8), torch.arange(5)
    torch.testing.assert_close(block(x, positions=positions), x + block.attn(block.attn_norm(x), positions=positions))
