"""Normalisation over the channel axis: each position on its own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from model.config import ModelConfig

_EPS = 1e-6


def build_norm(config: ModelConfig) -> nn.Module:
    """(…, C) -> (…, C). layernorm: (x - mean)/deviation · weight + bias; rmsnorm: x/rms · weight."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return RMSNorm(config.n_embd, eps=_EPS)


class RMSNorm(nn.RMSNorm):
    """PyTorch's, by `rms_normalise`."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalise(x) * self.weight


def rms_normalise(x: Tensor) -> Tensor:
    """Each vector of the last axis to unit root-mean-square, computed in at least float32, without parameters."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.device.type == "cpu":
        return _Normalise.apply(exact).to(x.dtype)
    return F.rms_norm(exact, (x.shape[-1],), eps=_EPS).to(x.dtype)  # one kernel on a GPU


class _Normalise(Function):
    """The same on CPU, where PyTorch takes twice as long: a dozen operations back, here four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + _EPS).rsqrt()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """y = x·s with s = rms(x)⁻¹, so dx = s·(dy - y·mean(y·dy))."""
        y, scale = ctx.saved_tensors
        return torch.addcmul(grad, y, (grad * y).mean(-1, keepdim=True), value=-1).mul_(scale)
