"""The oracle itself: its gradients by finite differences (its values: test_contract.py, in plain Python)."""

import pytest
import torch

from model.attention.mask import MaskRule
from model.attention.reference import ReferenceAttention


@pytest.mark.parametrize("options", [{}, {"softcap": 0.9}, {"alibi": True}, {"scale": 2.0}])
def test_gradients_are_finite_differences(options):
    shapes = (1, 2, 3, 2), (1, 1, 5, 2), (1, 1, 5, 2)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    path = ReferenceAttention(**options)
    assert torch.autograd.gradcheck(lambda q, k, v: path(q, k, v, rule=MaskRule(window=3, n_global=1)), inputs)
