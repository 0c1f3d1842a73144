"""Normalisation over the channel axis: each position on its own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import ModelConfig


def build_norm(config: ModelConfig) -> nn.Module:
    """(…, C) -> (…, C). layernorm: (x - mean)/deviation · weight + bias; rmsnorm: x/rms · weight."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=1e-6)


def rms_normalise(x: Tensor) -> Tensor:
    """Each vector of the last axis to unit root-mean-square, computed in at least float32, without parameters."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(dtype), (x.shape[-1],), eps=1e-6).to(x.dtype)
