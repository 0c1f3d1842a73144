"""What operators allocate, counted and not timed."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operator gives memory to; a view has none of its own."""

    n_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storages = [
            leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(out) if torch.is_tensor(leaf)
        ]
        self.n_elements = max([self.n_elements, *storages])
        return out


def largest_tensor(path, n, rule, *, dim=4):
    """Elements of the largest tensor in forward and backward of one head with n tokens."""
    q, k, v = (torch.randn(1, 1, n, dim, requires_grad=True) for _ in range(3))
    with LargestTensor() as counter:
        path(q, k, v, rule=rule).sum().backward()
    return counter.n_elements
