"""What is flash's own: which kernel runs, and that it never holds an n×n tensor."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.attention import build
from model.attention.mask import MaskRule


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operator returns."""

    n_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.n_elements = max([self.n_elements, *sizes])
        return out


def largest(name, n):
    q, k, v = (torch.randn(1, 1, n, 4, requires_grad=True) for _ in range(3))
    with LargestTensor() as counter:
        build(name)(q, k, v, rule=MaskRule()).sum().backward()
    return counter.n_elements


def test_no_square_tensor_in_either_direction():
    assert largest("reference", 256) == 256 * 256
    assert largest("flash", 256) == 256 * 4


def test_kernel_names_what_runs():
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    assert build("flash").kernel(q, k, v, rule=MaskRule()) == "cpu flash_attention"
    dropping = build("flash", dropout=0.5)
    assert dropping.train().kernel(q, k, v, rule=MaskRule()) == "cpu math"
    assert dropping.eval().kernel(q, k, v, rule=MaskRule()) == "cpu flash_attention"


def test_log_sum_exp_comes_from_the_kernel():
    """Without an n×n tensor either."""
    q = torch.randn(1, 1, 256, 4)
    with LargestTensor() as counter:
        build("flash").log_sum_exp(q, q, rule=MaskRule())
    assert counter.n_elements == 256 * 4
