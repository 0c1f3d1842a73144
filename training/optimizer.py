"""How gradients become updates: AdamW, or Muon for the matrices of the blocks and AdamW for the rest; the learning rate
as a function of the step."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from training.config import OptimizerConfig
from training.runtime import Runtime


class Optimizer:
    """What the loop and a GradScaler ask of an optimizer: param_groups, step, zero_grad, state_dict.

    No torch.optim.Optimizer: creating one imports torch's compiler, which takes a second. A group says its `rule`
    (adamw or muon), its `lr`, which the loop sets before each step, and the `lr_ratio` to the schedule's rate.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self.param_groups = [{"lr": 0.0, "lr_ratio": 1.0} | group for group in groups if group["params"]]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (_muon_step if group["rule"] == "muon" else _adamw_step)(group, self.state)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        for p in self._parameters():
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim lays it out: parameters by their number."""
        numbers = {p: number for number, p in enumerate(self._parameters())}
        groups = [group | {"params": [numbers[p] for p in group["params"]]} for group in self.param_groups]
        return {"state": {numbers[p]: state for p, state in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Takes up the moments; the settings stay those of this run. ValueError when they belong to other groups."""
        sizes, theirs = ([len(g["params"]) for g in groups] for groups in (self.param_groups, content["param_groups"]))
        if sizes != theirs:
            raise ValueError(f"the checkpoint's optimizer has groups of {theirs} parameters, this one of {sizes}")
        parameters = list(self._parameters())
        self.state = {
            parameters[number]: {name: _like(value, parameters[number], name) for name, value in state.items()}
            for number, state in content["state"].items()
        }

    def _parameters(self) -> Iterable[Tensor]:
        return (p for group in self.param_groups for p in group["params"])


def _like(value: Tensor, parameter: Tensor, name: str) -> Tensor:
    if name != "step" and value.shape != parameter.shape:
        raise ValueError(f"the checkpoint's {name} is {tuple(value.shape)}, the parameter {tuple(parameter.shape)}")
    return value.to(parameter.device, copy=True)


def _adamw_step(group: dict[str, Any], states: dict[Tensor, dict[str, Tensor]]) -> None:
    """Fused: one pass over all parameters instead of several each."""
    parameters = [p for p in group["params"] if p.grad is not None]
    for p in parameters:
        if p not in states:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            states[p] = {"step": torch.zeros((), device=p.device)} | moments
    adamw(
        parameters,
        [p.grad for p in parameters if p.grad is not None],
        [states[p]["exp_avg"] for p in parameters],
        [states[p]["exp_avg_sq"] for p in parameters],
        [],
        [states[p]["step"] for p in parameters],
        fused=True,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


def _muon_step(group: dict[str, Any], states: dict[Tensor, dict[str, Tensor]]) -> None:
    """Jordan et al. 2024: the mean of gradients, made orthogonal, times √(rows / columns) where that is above one.

    Matrices of one shape, tall ones on their side, go through the iteration as one stack: see docs/speed.md.
    """
    momentum = group["momentum"]
    by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor, bool]]] = {}
    for p in group["params"]:
        if p.grad is None:
            continue
        mean = states.setdefault(p, {"momentum": torch.zeros_like(p)})["momentum"]
        mean.lerp_(p.grad, 1 - momentum)
        update = p.grad.lerp(mean, momentum)  # Nesterov's look ahead
        is_tall = p.shape[0] > p.shape[1]
        by_shape.setdefault((min(p.shape), max(p.shape)), []).append((p, update.mT if is_tall else update, is_tall))
    for same in by_shape.values():
        updates = orthogonalise(torch.stack([update for _, update, _ in same]), group["iterations"])
        for (p, _, is_tall), update in zip(same, updates, strict=True):
            if group["weight_decay"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update.mT if is_tall else update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalise(matrices: Tensor, n_iterations: int) -> Tensor:
    """(n, rows, columns), rows <= columns -> the same, each with singular values moved near one, in the input's dtype.

    Newton-Schulz iteration of fifth order with the coefficients of Jordan et al. 2024, which trade exactness for speed:
    after five, singular values between 0.001 and 1 of the norm lie between 0.68 and 1.13. In bfloat16, where that is
    the faster product; float64 stays.
    """
    x = matrices if matrices.dtype == torch.float64 else matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(n_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.to(matrices.dtype)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """AdamW: matrices (embeddings too) decay; vectors (norm weights, biases) do not. Muon: the matrices of the blocks,
    which alone decay, and AdamW for the rest. A tied weight is listed once."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rest = {"rule": "adamw", "betas": (config.beta1, config.beta2), "weight_decay": 0.0}
    if config.name == "adamw":
        matrices = rest | {"weight_decay": config.weight_decay, "params": [p for _, p in named if p.dim() >= 2]}
        return [matrices, rest | {"params": [p for _, p in named if p.dim() < 2]}]
    hidden = {p for name, p in named if p.dim() == 2 and name.startswith("blocks.")}
    muon = {
        "rule": "muon",
        "lr_ratio": config.muon_learning_rate / config.learning_rate,
        "momentum": config.muon_momentum,
        "iterations": config.muon_iterations,
        "weight_decay": config.weight_decay,
    }
    others = rest | {"params": [p for _, p in named if p not in hidden]}
    return [others, muon | {"params": [p for _, p in named if p in hidden]}]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    return Optimizer(parameter_groups(model, config))


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
