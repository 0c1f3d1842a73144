"""Attention in the terminal: coloured cells where there is colour, shades where there is none."""

from collections.abc import Sequence
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor

from probes.checks.path_check import CheckResult
from probes.pictures.draw import FORBIDDEN, HUE, provenance
from probes.pictures.labels import escape_unencodable, fit, labels
from probes.record import AttentionRecord

_INDEX_WIDTH = 7  # "131071 "
_MOST_LABEL_CELLS = 10
_SHADES, _ASCII_SHADES = " ░▒▓█", " .:*#"


def print_head(record: AttentionRecord, layer: int, head: int, console: Console) -> None:
    """One head, as wide as the terminal allows: a labelled cell a weight, or cells that hold the largest of many."""
    names = labels(record.info.token_bytes, record.info.token_ids)
    names = [escape_unencodable(name, console.encoding) for name in names]
    label_width = min(_MOST_LABEL_CELLS, max(map(cell_len, names)))
    if _INDEX_WIDTH + label_width + 1 + 2 * record.n_tokens <= console.width:
        lines = _labelled(record.pooled(layer, head, record.n_tokens), names, label_width, console)
        n_cells = record.n_tokens
    else:
        width = max(2, console.width - _INDEX_WIDTH)
        cells = record.pooled(layer, head, width if _has_colour(console) else width // 2)
        n_cells = len(cells)
        lines = _numbered(cells, -(-record.n_tokens // n_cells), console)
    _print_title(record, f"head {layer}.{head}", layer, n_cells, console)
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", crop=True)


def print_heads(record: AttentionRecord, layers: Sequence[int], heads: Sequence[int], console: Console) -> None:
    """Thumbnails named layer.head, side by side as far as the terminal is wide."""
    colour = _has_colour(console)
    per_band = max(1, min(len(heads), console.width // (14 if colour else 18)))
    room = console.width // per_band - 2
    n_cells = max(2, min(room if colour else room // 2, 32))
    _print_title(record, "heads named layer.head", layers[0], min(n_cells, record.n_tokens), console)
    for layer in layers:
        for start in range(0, len(heads), per_band):
            band = heads[start : start + per_band]
            pictures = [_cell_lines(record.pooled(layer, head, n_cells), console) for head in band]
            console.print(Text("  ").join(Text(fit(f"{layer}.{head}", room)) for head in band), no_wrap=True)
            for lines in zip(*pictures, strict=True):
                padded = [line + Text(" " * (room - line.cell_len)) for line in lines]
                console.print(Text("  ").join(padded), no_wrap=True, overflow="crop", crop=True)


def print_checks(checks: Sequence[CheckResult], title: str, console: Console) -> None:
    """A line a check, and below them what there is to say about those that failed or were not measured."""
    console.print(Text(title), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "measured", "limit"):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for check in checks:
        verdict = Text("ok", "green") if check.passed else Text("FAIL", "bold red")
        measured = "-" if check.measured is None else f"{check.measured:.1e}" if check.measured else "0"
        table.add_row(verdict, *map(Text, (check.name, measured, check.limit)))
    console.print(table)
    for check in checks:
        if check.detail:
            console.print(Text(f"{'ok' if check.passed else 'FAIL'}  {check.name}: {check.detail}"), soft_wrap=True)


def _print_title(record: AttentionRecord, name: str, layer: int, n_cells: int, console: Console) -> None:
    path, run = provenance(record, layer, n_cells)
    for line in (f"{name} · {path}", run):
        plain = line.replace("·", "-").replace("×", "x")
        console.print(Text(plain if console.options.ascii_only else line))
    legend = Text("rows: query, columns: key; weight 0 ")
    for i in range(11):
        legend.append_text(_cell(i / 10, console))
    legend.append_text(Text(" 1, forbidden "))
    legend.append_text(_cell(float("nan"), console))
    console.print(legend)


def _labelled(cells: Tensor, names: Sequence[str], label_width: int, console: Console) -> list[Text]:
    """A line a query with its number and label; below, each key's label from top to bottom in its two columns."""
    lines = []
    for i, (name, row) in enumerate(zip(names, cells.tolist(), strict=True)):
        line = Text(f"{i:>{_INDEX_WIDTH - 1}} {fit(name, label_width, '~' if console.options.ascii_only else '…')} ")
        for weight in row:
            line.append_text(_cell(weight, console))
        lines.append(line)
    margin = " " * (_INDEX_WIDTH + label_width + 1)
    height = min(_MOST_LABEL_CELLS, max(map(len, names)))
    for depth in range(height):
        columns = (fit(name[depth], 2) if depth < len(name) else "  " for name in names)
        lines.append(Text(margin + "".join(columns)))
    return lines


def _numbered(cells: Tensor, stride: int, console: Console) -> list[Text]:
    """Cells with the position of every line's first query before it; the keys' positions run along the bottom."""
    lines = _cell_lines(cells, console)
    rows_per_line = -(-len(cells) // len(lines))
    numbered = [Text(f"{i * rows_per_line * stride:>{_INDEX_WIDTH - 1}} ") + line for i, line in enumerate(lines)]
    last = (len(cells) - 1) * stride
    width = lines[0].cell_len
    numbered.append(Text(" " * _INDEX_WIDTH + "0" + f"{last:>{max(1, width - 1)}}"))
    return numbered


def _cell_lines(cells: Tensor, console: Console) -> list[Text]:
    """Square cells: with colour, two rows of cells in one line of half blocks; without, two characters a cell."""
    rows = cells.tolist()
    if not _has_colour(console):
        return [Text().join(_cell(weight, console) for weight in row) for row in rows]
    lines = []
    for upper, lower in zip(rows[::2], [*rows[1::2], [None] * len(rows)][: len(rows[::2])], strict=True):
        line = Text()
        for above, below in zip(upper, lower, strict=True):
            background = None if below is None else _colour(below)
            line.append("▀", Style(color=_colour(above), bgcolor=background))
        lines.append(line)
    return lines


def _cell(weight: float, console: Console) -> Text:
    """One weight in two columns."""
    if _has_colour(console):
        return Text("  ", Style(bgcolor=_colour(weight)))
    shades = _ASCII_SHADES if console.options.ascii_only else _SHADES
    if weight != weight:
        return Text("--" if console.options.ascii_only else "··")
    # Only an exact 0 and what would be invisible stay blank; the rest is spread over the shades.
    step = 0 if weight < 0.02 else min(len(shades) - 1, 1 + int(weight * (len(shades) - 1.5)))
    return Text(shades[step] * 2)


def _has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color and not console.options.ascii_only


def _colour(weight: float) -> str:
    """`#rrggbb` of a weight in 0..1, NaN for forbidden, between the stops of HUE."""
    if weight != weight:
        return FORBIDDEN
    weight = min(max(weight, 0.0), 1.0)
    (low, start), (high, end) = next(pair for pair in pairwise(HUE) if weight <= pair[1][0])
    share = (weight - low) / (high - low)
    first, second = ([int(colour[c : c + 2], 16) for c in (1, 3, 5)] for colour in (start, end))
    mixed = [round(a + (b - a) * share) for a, b in zip(first, second, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)
