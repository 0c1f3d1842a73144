"""Norms against their formulas."""

import torch

from model import ModelConfig
from model.norm import build_norm, rms_normalise


def test_layernorm_formula():
    norm = build_norm(ModelConfig(n_embd=8, n_head=2, bias=True)).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = 3 + 5 * torch.randn(4, 8, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)


def test_rmsnorm_formula():
    norm = build_norm(ModelConfig(n_embd=8, n_head=2, norm="rmsnorm")).double()
    torch.nn.init.normal_(norm.weight)
    x = 3 + 5 * torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight)


def test_bias_is_an_option_of_layernorm_only():
    for norm, bias, expected in (("layernorm", True, 2), ("layernorm", False, 1), ("rmsnorm", True, 1)):
        assert len(list(build_norm(ModelConfig(norm=norm, bias=bias)).parameters())) == expected


def test_rms_normalise_gives_unit_vectors_in_the_dtype_it_got():
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        x = 100 * torch.randn(3, 16).to(dtype)
        got = rms_normalise(x)
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.double().square().mean(-1).sqrt(), torch.ones(3).double(), atol=tolerance, rtol=0
        )
    assert torch.equal(rms_normalise(torch.zeros(2, 4)), torch.zeros(2, 4))
