"""The optimizer over two groups of parameters."""

import torch
from torch import nn

from training.config import OptimizerConfig
from training.runtime import Runtime


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices (embeddings too) decay; vectors (norm weights, biases) do not. A tied weight is listed once."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, fused: one pass over all parameters instead of several each."""
    groups = [group for group in parameter_groups(model, config.weight_decay) if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def build_scaler(runtime: Runtime) -> torch.amp.GradScaler:
    """Scales the loss so that float16 gradients do not underflow; for other types it does nothing."""
    return torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
