"""Rows of measurements as tables and as a plot, with the exponent of n that fits them."""

import math
from collections.abc import Sequence
from typing import Any

FIELDS = {"seconds": ("Time", "ms", 1e-3), "bytes": ("Peak memory beyond the inputs", "MB", 1e6)}


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """p of values ≈ c·n^p by least squares on logarithms; None for fewer than two sizes."""
    if len(sizes) < 2:
        return None
    x, y = ([math.log(value) for value in some] for some in (sizes, values))
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - x_mean) ** 2 for a in x)


def fit(row: dict[str, Any]) -> dict[str, Any]:
    """The row and its exponents, fitted to its three largest sizes: what does not grow weighs less there."""
    return row | {f"{field}_exponent": exponent(row["n"][-3:], row[field][-3:]) for field in FIELDS}


def print_tables(rows: Sequence[dict[str, Any]], sizes: Sequence[int], about: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for field, (title, unit, scale) in FIELDS.items():
        console.print(f"{title} in {unit} by number of tokens n")
        table = Table("path", "", box=box.SIMPLE)
        for title in (*map(str, sizes), "grows as"):
            table.add_column(title, justify="right")
        for row in rows:
            values = dict(zip(row["n"], row[field], strict=True))
            cells = [_three_digits(values[n] / scale) if n in values else "–" for n in sizes]
            power = row[f"{field}_exponent"]
            table.add_row(
                row["path"] if row["direction"] == "forward" else "",
                row["direction"].replace("forward+", "+ "),
                *cells,
                "–" if power is None else f"n^{power:.2f}",
            )
        console.print(table)
    for row in rows:
        if row["skipped"]:
            console.print(f"{row['path']}, {row['direction']}: {row['skipped']}", highlight=False)
    console.print(about, highlight=False)


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:#.3g}"


def draw(rows: Sequence[dict[str, Any]], file: str) -> None:
    """Time and memory over n, both logarithmic, with the slopes of n and n² to compare with."""
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(row["direction"] for row in rows))
    figure = Figure(figsize=(13, 4.2 * len(directions)), layout="constrained")
    panels = figure.subplots(len(directions), 2, sharex=True, squeeze=False)
    names = list(dict.fromkeys(row["path"] for row in rows))
    for direction, line in zip(directions, panels, strict=True):
        for (field, (title, unit, scale)), panel in zip(FIELDS.items(), line, strict=True):
            shown = [row for row in rows if row["direction"] == direction and row["n"]]
            for row in shown:
                values, power = [value / scale for value in row[field]], row[f"{field}_exponent"]
                label = row["path"] if power is None else f"{row['path']}, n^{power:.2f}"
                panel.plot(row["n"], values, marker="o", label=label, color=f"C{names.index(row['path'])}")
            if shown:
                sizes = sorted({n for row in shown for n in row["n"]})
                low = min(row[field][0] / scale for row in shown)
                for power, style in ((1, ":"), (2, "--")):
                    slope = [low * (n / sizes[0]) ** power for n in sizes]
                    panel.plot(sizes, slope, style, color="grey", linewidth=1, label="n" if power == 1 else "n²")
            panel.set(xscale="log", yscale="log", title=f"{title}, {direction}", xlabel="tokens", ylabel=unit)
            panel.set_xticks(sizes if shown else [], [str(n) for n in sizes] if shown else [])
            panel.minorticks_off()
            panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=150)
