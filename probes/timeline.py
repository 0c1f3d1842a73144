"""When each role forms: head scores at intervals of training, and their picture."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model import GPT
from probes.capture import Tokenizer
from probes.pictures.draw import new_figure, save_figure
from probes.scores import ROLES, score_heads
from probes.table import Table

Row = Mapping[str, Any]  # {"step": 250, "scores": {"0.1": {"previous": 0.5, …}, …}}


def look_at_heads(model: GPT, tokenizer: Tokenizer, run: Path, step: int, dtype: str) -> dict[str, dict[str, float]]:
    """The scores of every head by name, for a log; keeps the record of the random tokens in run/records.

    The tokens are the same at every step of every run of this vocabulary and block_size. Takes no number from the
    global random streams and leaves the model as it is. What goes wrong is printed, gives no scores and stops no
    training.
    """
    about: dict[str, Any] = {"n_valid_tokens": tokenizer.vocab_size, "token_bytes": tokenizer.token_bytes}
    try:
        scores, record = score_heads(model, n_draws=1, dtype=dtype, step=step, **about)
        (run / "records").mkdir(exist_ok=True)
        record.save(run / "records" / f"step-{step:06d}.safetensors")
    except (ValueError, OSError) as error:
        print(f"no look at the heads after step {step}: {error}", file=sys.stderr)
        return {}
    return {str(name): {k: v for k, v in head.items() if math.isfinite(v)} for name, head in scores.items()}


def timeline_table(rows: Sequence[Row]) -> Table:
    """For each role the heads that ever have it, earliest first: the step from which on they do, without a gap up to
    the largest score. A role that no head has shows its best head, without a step. ValueError without rows."""
    if not rows:
        raise ValueError("no head scores were written in training; train with --probe.interval 250")
    lines: list[tuple[str, str, int | None, float, int, float]] = []
    for role, (key, least) in ROLES.items():
        curves = _curves(rows, key)
        peaks = {name: max(curve, key=lambda point: point[1]) for name, curve in curves.items()}
        holders = [name for name in peaks if peaks[name][1] >= least] or sorted(peaks, key=lambda n: -peaks[n][1])[:1]
        found = []
        for name in holders:
            peak_step, peak = peaks[name]
            below = max((step for step, score in curves[name] if score < least and step < peak_step), default=-1)
            formed = next((step for step, score in curves[name] if step > below and score >= least), None)
            found.append((role, name, formed, peak, peak_step, curves[name][-1][1]))
        lines += sorted(found, key=lambda line: (math.inf if line[2] is None else line[2], -line[3]))
    about = {"steps": f"{rows[0]['step']}..{rows[-1]['step']}", "looks": len(rows)}
    thresholds = {f"least {role}": least for role, (_, least) in ROLES.items()}
    return Table("when each role forms", ("role", "head", "formed", "peak", "at", "last"), lines, about | thresholds)


def draw_timeline(rows: Sequence[Row], path: Path | str) -> None:
    """PNG or SVG: a panel a role, a line a head; heads that earn the role are named, the dashes are its threshold."""
    figure = new_figure(10, 5.5)
    panels = figure.subplots(2, 3, sharex=True)
    for axes, (role, (key, least)) in zip(panels.flat, ROLES.items(), strict=True):
        for name, curve in _curves(rows, key).items():
            has_role = max(score for _, score in curve) >= least
            style: dict[str, Any] = {"label": name, "linewidth": 1.8} if has_role else {"color": "#bbbbbb"}
            axes.plot(*zip(*curve, strict=True), marker=".", markersize=3, **style)
        axes.axhline(least, color="black", linewidth=0.7, linestyle="--")
        axes.set_title(role, fontsize=9)
        axes.set_ylim(0, 1.05)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, ncols=2)
    for axes in panels[-1]:
        axes.set_xlabel("step")
    figure.subplots_adjust(left=0.05, right=0.98, top=0.94, bottom=0.09, wspace=0.18)
    save_figure(figure, Path(path))


def _curves(rows: Sequence[Row], key: str) -> dict[str, list[tuple[int, float]]]:
    """head: [(step, score)]; heads without this score are left out."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, scores in row["scores"].items():
            if key in scores:
                curves.setdefault(name, []).append((row["step"], scores[key]))
    return curves
