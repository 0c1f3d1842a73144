"""What a run writes down about itself: metrics.jsonl always, wandb when asked, a loss curve, hardware use."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import IO, Any, cast

import torch
from tqdm import tqdm

from model import GPT, ModelConfig
from model.block import Block
from training.config import Config
from training.runtime import Runtime
from training.state import TrainState


class MetricsLog:
    """Rows go to metrics.jsonl in the run directory, those of head scores to probes.jsonl, one JSON object a line, and
    to wandb where it is on.

    A resumed run first drops the rows after the step that it resumes from: they will be written again.
    """

    def __init__(self, directory: Path, config: Config, *, resumed_step: int, enabled: bool = True) -> None:
        self._files: dict[str, IO[str]] = {}
        self._wandb: Any = None
        if not enabled:
            return
        for name in ("metrics.jsonl", "probes.jsonl"):
            path = directory / name
            if name == "probes.jsonl" and not config.probe.interval and not path.exists():
                continue
            kept = [row for row in read_metrics(directory, name) if row["step"] <= resumed_step]
            beside = path.with_suffix(".tmp")
            beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            os.replace(beside, path)
            self._files[name] = path.open("a", encoding="utf-8")
        self._wandb = _start_wandb(directory, config)

    def write(self, row: dict[str, Any]) -> None:
        """row holds `step`; values that are not finite are left out, since JSON has no word for them."""
        row = {key: value for key, value in row.items() if math.isfinite(value)}
        self._write("metrics.jsonl", row, row)

    def write_scores(self, step: int, scores: dict[str, dict[str, float]]) -> None:
        """scores: of each head by name, finite; none write nothing."""
        if not scores:
            return
        flat = {f"heads/{key}/{name}": value for name, head in scores.items() for key, value in head.items()}
        self._write("probes.jsonl", {"step": step, "scores": scores}, {"step": step} | flat)

    def _write(self, name: str, row: dict[str, Any], flat: dict[str, Any]) -> None:
        if name not in self._files:
            return
        self._files[name].write(json.dumps(row) + "\n")
        self._files[name].flush()
        if self._wandb is not None:
            _never_stop_training(self._wandb.log, flat, step=row["step"])

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if self._wandb is not None:
            _never_stop_training(self._wandb.finish)


def read_metrics(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl or probes.jsonl; a last line that a kill cut short is left out."""
    rows = []
    try:
        lines = (directory / name).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def plot_losses(directory: Path) -> Path:
    """Draws loss.png from metrics.jsonl."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained", dpi=150)
    axes = figure.subplots()
    rows = read_metrics(directory)
    for name, label, style in (("train_loss", "training", {"alpha": 0.5}), ("val_loss", "validation", {"marker": "o"})):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=f"{label}, last {points[-1][1]:.3f}", markersize=3, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=directory.name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(directory / "loss.png")
    return directory / "loss.png"


def progress_bar(config: Config, state: TrainState) -> tqdm:
    """Steps done, time left; on the main process only."""
    return tqdm(
        total=config.train.last_step,
        initial=state.step,
        desc="training",
        unit="step",
        dynamic_ncols=True,
        disable=not (config.log.progress and state.runtime.is_main),
    )


def flops_per_token(config: ModelConfig, n_parameters: int) -> int:
    """Arithmetic of one trained token: 6 a parameter, and 12·C·T a layer for the scores and the weighted sum, without
    a discount for the causal half (Chowdhery et al. 2022, appendix B)."""
    return 6 * n_parameters + 12 * config.n_layer * config.n_embd * config.block_size


def attention_kernel(model: GPT, runtime: Runtime) -> str:
    """The implementations that the attention paths of the layers run in training, by their own word."""
    config = model.config
    q = torch.zeros(
        1, config.n_head, config.block_size, config.head_dim, dtype=runtime.dtype, device=runtime.device
    ).requires_grad_()
    k = q[:, : config.kv_heads]
    layers = [cast(Block, block).attn for block in model.blocks]
    return ", ".join(dict.fromkeys(layer.path.kernel(q, k, k, rule=layer.rule) for layer in layers))


# Dense bfloat16 / float16 peak of the makers' data sheets, in FLOP/s.
_KNOWN_PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "T4": 65e12}


def peak_flops(runtime: Runtime) -> tuple[float, str]:
    """FLOP/s of the device in the run's dtype, and where the number comes from: the data sheet, or the fastest of a
    few matrix products done now (0.2 s)."""
    if runtime.device.type == "cuda" and runtime.dtype != torch.float32:
        name = torch.cuda.get_device_name(runtime.device)
        for known, peak in _KNOWN_PEAKS.items():
            if known in name:
                return peak, f"data sheet of {known}"
    size = 4096 if runtime.device.type == "cuda" else 1024
    a = torch.ones(size, size, dtype=runtime.dtype, device=runtime.device)
    best, stop = math.inf, time.perf_counter() + 0.2
    while time.perf_counter() < stop:
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best, f"measured, {runtime.dtype_name} {size}³ matrix product"


def hardware_use(state: TrainState) -> str:
    """A line on the speed of the run's steps and the share of the device's peak that it is (MFU)."""
    if not state.seconds:
        return "no steps were taken"
    model, runtime = state.model, state.runtime
    speed = state.n_tokens / state.seconds
    peak, source = peak_flops(runtime)
    used = speed * flops_per_token(model.config, model.n_parameters()) / runtime.world_size / peak
    return (
        f"trained {state.n_tokens:,} tokens in {state.seconds:.1f} s of steps: {speed:,.0f} tokens/s, "
        f"{used:.0%} of {peak / 1e12:.2f} TFLOP/s ({source})"
    )


def _start_wandb(directory: Path, config: Config) -> Any:
    if config.log.wandb == "off":
        return None
    import wandb

    return _never_stop_training(
        wandb.init,
        project=config.log.wandb_project,
        name=directory.name,
        dir=str(directory),
        mode=config.log.wandb,
        config=config.to_dict(),
    )


def _never_stop_training(call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:  # whatever a logging service does, the run goes on
        print(f"wandb: {error}; the run goes on", file=sys.stderr)
        return None
