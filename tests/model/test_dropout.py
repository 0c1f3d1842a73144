"""Dropout on CPU against its definition."""

import pytest
import torch

from model.dropout import Dropout


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.999])
def test_numbers_are_zero_or_scaled_so_that_the_mean_stays(p):
    dropped = min(max(1, round(256 * p)), 255) / 256
    layer, x = Dropout(p).train(), torch.full((333, 301), 3.0, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    is_zero = out == 0
    assert torch.allclose(out[~is_zero], torch.tensor(3.0 / (1 - dropped), dtype=torch.float64))
    n = x.numel()
    assert abs(is_zero.double().mean().item() - dropped) < 5 * (dropped * (1 - dropped) / n) ** 0.5
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach() / 3)
    # Neighbours come from one draw: they are independent all the same
    both = (is_zero[:, :-1] & is_zero[:, 1:]).double().mean().item()
    assert abs(both - dropped**2) < 6 * (dropped**2 / n) ** 0.5 + 1e-4


def test_outside_training_and_at_zero_nothing_happens():
    x = torch.randn(7, 5)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    state = torch.get_rng_state()
    assert torch.equal(Dropout(0.0).train()(x), x)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_generator_decides():
    layer, x = Dropout(0.3).train(), torch.ones(3, 7, dtype=torch.bfloat16)
    torch.manual_seed(5)
    first = layer(x)
    assert not torch.equal(layer(x), first)
    torch.manual_seed(5)
    assert torch.equal(layer(x), first)
    assert first.dtype == torch.bfloat16
