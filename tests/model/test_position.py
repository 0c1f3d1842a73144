"""Positions against the formulas of their papers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.attention.path import alibi_slopes
from model.position import rotate, sinusoidal


@pytest.mark.parametrize("n_embd", [6, 7])
def test_sinusoidal_is_the_papers_formula(n_embd):
    """PE(pos, 2i) = sin(pos / 10000^(2i/C)), PE(pos, 2i + 1) = cos(…) (Vaswani et al. 2017, section 3.5)."""
    got = sinusoidal(torch.tensor([0, 1, 5, 1000]), n_embd)
    assert got.dtype == torch.float32
    for row, place in zip(got.tolist(), (0, 1, 5, 1000), strict=True):
        for channel, value in enumerate(row):
            wave = math.sin if channel % 2 == 0 else math.cos
            angle = place / 10000 ** ((channel - channel % 2) / n_embd)
            assert abs(value - wave(angle)) < 1e-4  # an angle of 1000 in float32 is known to 6e-5


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 1000), st.sampled_from([2, 4, 6, 16]))
def test_rotated_product_depends_on_the_distance_only(m, n, shift, dim):
    generator = torch.Generator().manual_seed(dim)
    q, k = torch.randn(2, 1, 1, 1, dim, dtype=torch.float64, generator=generator)

    def product(one, other):
        return (rotate(q, torch.tensor([one]), 10000.0) * rotate(k, torch.tensor([other]), 10000.0)).sum().item()

    assert math.isclose(product(m, n), product(m + shift, n + shift), abs_tol=1e-9)


def test_rotation_is_multiplication_by_a_complex_number():
    """Channels d and d + D/2 are a complex number, turned by position · base^(-2d/D) (Su et al. 2021, equation 15)."""
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 7, 100])
    angles = torch.tensor([[p * 100.0 ** (-2 * d / 8) for d in range(4)] for p in positions.tolist()]).double()
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    got = rotate(x, positions, 100.0)
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), dim=-1), atol=1e-5, rtol=0)
    assert torch.equal(got[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1))


def test_rotation_keeps_the_dtype_and_computes_in_float32():
    x = torch.randn(1, 1, 2, 4).bfloat16()
    got = rotate(x, torch.tensor([0, 999]), 10000.0)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), torch.tensor([0, 999]), 10000.0).bfloat16())


def test_alibi_slopes_of_the_paper():
    """8 heads: 1/2, 1/4 … 1/256; 16 heads: 1/√2, 1/2 … (Press et al. 2022, section 3)."""
    eight = alibi_slopes(8, torch.float64, torch.device("cpu"))
    assert eight.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    sixteen = alibi_slopes(16, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(sixteen[:2], torch.tensor([0.5**0.5, 0.5]).double(), atol=1e-7, rtol=0)
    assert sixteen[-1] == 1 / 256
