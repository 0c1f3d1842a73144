"""What is flash's own: which kernel runs, and that it never holds an n×n tensor."""

import pytest
import torch

from model import GPT, ModelConfig
from model.attention import build
from model.attention.flash import KernelLogSumExp
from model.attention.mask import MaskRule
from tests.counting import LargestTensor, largest_tensor


def test_no_square_tensor_in_either_direction():
    assert largest_tensor(build("reference"), 256, MaskRule()) == 256 * 256
    assert largest_tensor(build("flash"), 256, MaskRule()) == 256 * 4


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


def test_a_pinned_kernel_runs():
    """math is the explicit form in PyTorch's own operators: the map is there, and the numbers are the kernel's."""
    q, k, v = (torch.randn(2, 4, 33, 8) for _ in range(3))
    math, auto = build("flash", kernel="math"), build("flash")
    assert math.kernel(q, k, v, rule=MaskRule()) == "cpu math"
    assert build("flash", kernel="flash").kernel(q, k, v, rule=MaskRule()) == "cpu flash_attention"
    assert largest_tensor(math, 256, MaskRule()) == 256 * 256
    assert largest_tensor(build("flash", kernel="flash"), 256, MaskRule()) == 256 * 4
    torch.testing.assert_close(math(q, k, v, rule=MaskRule()), auto(q, k, v, rule=MaskRule()), rtol=1e-5, atol=1e-6)
    pinned = build("flash", kernel="flash")(q, k, v, rule=MaskRule())
    assert torch.equal(pinned, auto(q, k, v, rule=MaskRule()))


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_a_kernel_that_is_not_there_is_refused_by_name(kernel):
    """In a model too, and the message names the setting and those that would run."""
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    message = (
        rf"PyTorch's {kernel} attention kernel does not run here \(cpu, torch\.float32, head_dim 4\); "
        r"model\.flash_kernel could be: auto, flash, math"
    )
    with pytest.raises(ValueError, match=message):
        build("flash", kernel=kernel)(q, k, v, rule=MaskRule())
    with pytest.raises(ValueError, match=message):
        build("flash", kernel=kernel).kernel(q, k, v, rule=MaskRule())
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=5, flash_kernel=kernel))
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(1, 8, dtype=torch.int64))


def test_an_unknown_kernel_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="flash kernel is 'fast'; choose one of: auto, flash, efficient, cudnn, math"):
        build("flash", kernel="fast")


def test_the_log_sum_exp_of_a_forward_pass_is_kept_as_it_runs():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 33, 64)
    path = build("flash")
    with torch.no_grad(), KernelLogSumExp() as kernel:
        assert kernel.take() is None
        out = path(q, k, v, rule=MaskRule())
        lse = kernel.take()
        assert kernel.take() is None
    scores = (q.double() @ k.double().mT / 8).masked_fill(torch.ones(33, 33).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=0)
    assert torch.equal(out, path(q, k, v, rule=MaskRule()))
