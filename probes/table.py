"""What a probe says: a table of named columns. Every probe prints with this, for people and, as JSON, for programs."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.cells import cell_len

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Table:
    """Rows of values under named columns. `about` is what holds for all rows: run, step, text, path, limits."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} values under {len(self.columns)} columns: {row}")

    def to_json(self) -> str:
        """`{"title", "about", "rows": [{column: value}]}`; numbers that are not finite are null."""
        rows = [{name: _plain(value) for name, value in zip(self.columns, row, strict=True)} for row in self.rows]
        return json.dumps({"title": self.title, "about": _plain(dict(self.about)), "rows": rows}, allow_nan=False)

    def sorted_by(self, column: str, *, descending: bool = True) -> "Table":
        """By one column; rows without a number there come last. ValueError with the choices for another column."""
        if column not in self.columns:
            raise ValueError(f"there is no column {column!r}; choose one of: {', '.join(self.columns)}")
        place = list(self.columns).index(column)
        has = [row for row in self.rows if _plain(row[place]) is not None]
        lacks = [row for row in self.rows if _plain(row[place]) is None]
        ordered = sorted(has, key=lambda row: row[place], reverse=descending)  # type: ignore[arg-type, return-value]
        return Table(self.title, self.columns, [*ordered, *lacks], self.about)


def write_table(table: Table, path: Path) -> None:
    """Keeps it as JSON, beside and renamed; says so and goes on where the disk refuses."""
    from probes.record import replacing

    try:
        with replacing(path) as beside:
            beside.write_text(table.to_json(), encoding="utf-8")
    except ValueError as error:
        print(error, file=sys.stderr)


def print_table(table: Table, *, as_json: bool) -> None:
    """On standard output: one JSON object, or the title, the table and a line of what else there is to know."""
    if as_json:
        print(table.to_json())
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    from probes.pictures.labels import escape_unencodable

    console = Console()
    console.print(Text(table.title), soft_wrap=True)
    cells = [[escape_unencodable(_shown(value), console.encoding) for value in row] for row in table.rows]
    for band in _bands(table.columns, cells, console.width):
        shown = RichTable(box=None, pad_edge=False)
        for place in band:
            is_number = all(isinstance(row[place], int | float | None) for row in table.rows)
            shown.add_column(table.columns[place], justify="right" if is_number else "left", overflow="fold")
        for row in cells:
            shown.add_row(*(Text(row[place]) for place in band))
        console.print(shown)
    if table.about:
        console.print(Text(" · ".join(f"{key} {_shown(value)}" for key, value in table.about.items())), soft_wrap=True)


def _bands(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """The columns in groups that each fit beside the first one, which all groups begin with."""
    widths = [2 + max(map(cell_len, (name, *(row[i] for row in cells)))) for i, name in enumerate(columns)]
    bands, used = [[0]], widths[0]
    for place in range(1, len(columns)):
        if used + widths[place] > width and len(bands[-1]) > 1:
            bands.append([0])
            used = widths[0]
        bands[-1].append(place)
        used += widths[place]
    return bands


def _shown(value: Any) -> str:
    if _plain(value) is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 10_000 else f"{value:.1e}"
    if isinstance(value, str):  # a newline or an escape sequence in a token must not reach the terminal
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in value)
    return str(value)


def _plain(value: Any) -> Any:
    """For JSON: NaN and infinities become None, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
