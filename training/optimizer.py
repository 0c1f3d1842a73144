"""The optimizer over two groups of parameters, and its learning rate as a function of the step."""

import math

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


def learning_rate(step: int, max_steps: int, config: OptimizerConfig) -> float:
    """The rate of step `step`, counted from 1: a linear rise over warmup_steps, a plateau, then the way down to
    final_fraction of the peak at max_steps."""
    peak = config.learning_rate
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    n_after_warmup = max(1, max_steps - config.warmup_steps)
    n_decay = max(1, round(config.decay_fraction * n_after_warmup))
    progress = max(0.0, (step - (max_steps - n_decay)) / n_decay)  # 0 at the peak, 1 at max_steps
    remaining = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
    return peak * (config.final_fraction + (1 - config.final_fraction) * remaining[config.schedule])


def build_scaler(runtime: Runtime) -> torch.amp.GradScaler:
    """Scales the loss so that float16 gradients do not underflow; for other types it does nothing."""
    return torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
