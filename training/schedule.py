"""The learning rate as a function of the step."""

import math

from training.config import OptimizerConfig


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
