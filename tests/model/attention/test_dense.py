"""What is dense's own: the explicit map in the number type of q."""

import torch

from model.attention import build
from model.attention.mask import MaskRule
from tests.counting import largest_tensor


def test_the_map_is_in_the_inputs_type_and_close_to_the_exact_one():
    q, k, v = (torch.randn(2, 4, 64, 16).bfloat16() for _ in range(3))
    kinds = []

    class Softmax(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.softmax:
                kinds.append((args[0].dtype, tuple(args[0].shape)))
            return function(*args, **(kwargs or {}))

    with Softmax():
        got = build("dense")(q, k, v, rule=MaskRule())
    assert kinds == [(torch.bfloat16, (8, 64, 64))]
    exact = build("reference")(q.double(), k.double(), v.double(), rule=MaskRule())
    assert (got.double() - exact).abs().max() < 0.05  # bfloat16 has 8 bits


def test_it_holds_the_map():
    assert largest_tensor(build("dense"), 256, MaskRule()) == 256 * 256
