"""Which learning rate? A range test (Smith 2017): it rises with every step until the loss does, and nothing is kept."""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.cli import NonFiniteLoss
from training.config import Config
from training.evaluate import Evaluation
from training.state import TrainState

LOW, HIGH = 0.01, 30.0  # of the configured rates, all of which rise alike
_SMOOTHING = 0.8


class _EndOfRange(Exception):
    """The loss has doubled."""


def range_test(config: Config, state: TrainState, run_steps: Callable[..., None]) -> None:
    """Runs config.train.find_lr steps, from LOW to HIGH times the configured rates; prints a table and a suggestion and
    leaves find_lr.png and .json in the run directory, but no checkpoint. Ends early when the loss has doubled; after a
    signal, which stays in state.stop_signal, nothing is written."""
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)  # refuses before the steps, not after them
    n_steps, rows = config.train.find_lr, list[tuple[float, float, float]]()
    test = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, schedule="constant", warmup_steps=0),
        train=dataclasses.replace(config.train, max_steps=n_steps, stop_at=0, log_interval=1, eval_interval=n_steps),
        probe=dataclasses.replace(config.probe, interval=0),
    )

    def scale(factor: float) -> None:
        for group in state.optimizer.param_groups:
            group["lr_ratio"] *= factor

    def log(row: dict[str, Any]) -> None:
        loss = row["train_loss"]
        mean = _SMOOTHING * rows[-1][2] + (1 - _SMOOTHING) * loss if rows else loss
        rows.append((row["learning_rate"], loss, mean))
        scale((HIGH / LOW) ** (1 / (n_steps - 1)))
        if mean > 2 * min(mean for _, _, mean in rows):
            raise _EndOfRange

    scale(LOW)
    nothing: dict[str, Any] = {"validate": lambda: Evaluation(math.nan, math.nan), "look": lambda: None}
    with contextlib.suppress(_EndOfRange, NonFiniteLoss):
        run_steps(test, state, **nothing, save=lambda _: None, log=log)
    if state.runtime.is_main and state.stop_signal:
        print("train.py: range test interrupted, nothing was written", file=sys.stderr)
    elif state.runtime.is_main:
        report(config, rows)


def suggest(rows: list[tuple[float, float, float]]) -> float:
    """A third of the rate at which the smoothed loss was lowest: near the edge, on the safe side."""
    return min(rows, key=lambda row: row[2])[0] / 3


def report(config: Config, rows: list[tuple[float, float, float]]) -> None:
    """The table, the picture and the suggestion. ValueError when not one step was finite."""
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError(f"the loss was not finite at {LOW:g} times the rates already; try lower ones")
    best, relative = suggest(rows), suggest(rows) / config.optimizer.learning_rate
    print("learning rate   loss  smoothed")
    for rate, loss, mean in rows[:: max(1, len(rows) // 16)]:
        print(f"{rate:13.2e} {loss:6.3f} {mean:9.3f}")
    also = ""
    if config.optimizer.name == "muon":
        also = f" --optimizer.muon_learning_rate {relative * config.optimizer.muon_learning_rate:.1e}"
    print(f"suggestion: --optimizer.learning_rate {best:.1e}{also} ({relative:.2g} times the configured)")
    figure = Figure(figsize=(7, 4), layout="constrained", dpi=150)
    axes = figure.subplots()
    rates, losses, means = zip(*rows, strict=True)
    axes.plot(rates, losses, alpha=0.4, label="training")
    axes.plot(rates, means, label="smoothed")
    axes.axvline(best, color="grey", linestyle="--", label=f"suggestion {best:.1e}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss (nats per token)", title="range test")
    axes.legend()
    path = Path(config.run.dir) / "find_lr.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    names = ("learning_rate", "loss", "smoothed")
    table = {"suggestion": best, "rows": [dict(zip(names, row, strict=True)) for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(table))
    print(f"picture and table: {path}, {path.with_suffix('.json')}")
