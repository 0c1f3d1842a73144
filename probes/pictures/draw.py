"""Attention as pictures and tables: one head large, all heads as thumbnails, one head as CSV.

Rows are queries, columns keys. White is 0, one hue, always 0..1; what the mask forbids is grey.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.pictures.labels import cell_len, distinct, escape_missing, fit, fonts_for, labels
from probes.record import AttentionRecord, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_SUFFIXES = (".png", ".svg")
_DPI = 200
_SMALL, _LARGE = 8, 9  # points: token labels and numbers; names of axes, titles
_MOST_CELLS = 512  # each cell keeps at least two pixels, so that no single bright one falls between pixels
_MOST_LABELS = 64
_LONGEST_LABEL = 40  # columns
FORBIDDEN = "#d8d8d8"
# (weight, colour): luminance falls all the way. Small weights get more than their share of it, because a row divides
# one unit among all its keys; the colour bar shows the division.
HUE = ((0, "#ffffff"), (0.04, "#dceaf6"), (0.15, "#a9cce6"), (0.35, "#61a7d2"), (0.65, "#2171b5"), (1, "#08306b"))


def draw_head(record: AttentionRecord, layer: int, head: int, path: Path | str, *, title: bool = True) -> None:
    """One head as PNG or SVG, by the suffix of `path`. title: say above what made it; a paper has its caption.

    ValueError for another suffix or a head that is not there.
    """
    _check_suffix(Path(path))
    cells = record.pooled(layer, head, _MOST_CELLS).numpy()
    n, n_cells = record.n_tokens, len(cells)
    is_labelled = n <= _MOST_LABELS
    # Labelled cells are as high as a line of text; the map stays between 2 and 7 inches where it can.
    side = n * min(max(7 / n, 0.15), 0.45) if is_labelled else 7.0
    figure = new_figure(side + 2.2, side + 1.4)
    axes = figure.add_axes((1.2 / (side + 2.2), 0.7 / (side + 1.4), side / (side + 2.2), side / (side + 1.4)))
    image = _show(axes, cells, n)
    axes.spines[:].set(linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=_SMALL, width=0.6)
    if is_labelled:
        names = distinct(labels(record.info.token_bytes, record.info.token_ids))
        fonts, drawable = fonts_for(names)
        names = [escape_missing(fit(name, min(cell_len(name), _LONGEST_LABEL)), drawable) for name in names]
        text: dict[str, Any] = {"fontsize": _SMALL, "fontfamily": fonts, "parse_math": False}
        # Short names stand upright; long ones would run into each other.
        upright = max(map(len, names)) * 0.09 < side / n
        axes.set_xticks(range(n), names, rotation=0 if upright else 90, **text)
        axes.set_yticks(range(n), names, **text)
        axes.tick_params(length=0, pad=3)
    axes.set_xlabel("key (attended to)", fontsize=_LARGE)
    axes.set_ylabel("query (attends)", fontsize=_LARGE)
    if title:
        name = _title(record, f"head {layer}.{head}", layer, n_cells)
        axes.set_title(name, fontsize=_LARGE, loc="left", parse_math=False)
    bar_height = min(side, 3.0)
    bar = figure.add_axes(
        ((1.2 + side + 0.15) / (side + 2.2), 0.7 / (side + 1.4), 0.12 / (side + 2.2), bar_height / (side + 1.4))
    )
    _scale(figure, image, bar)
    save_figure(figure, Path(path))


def draw_heads(
    record: AttentionRecord,
    path: Path | str,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    title: bool = True,
) -> None:
    """Thumbnails named layer.head, a row of pictures a layer, as PNG or SVG. None draws all that the record holds.

    One map is in memory at a time, and only a band of its rows. ValueError for another suffix.
    """
    _check_suffix(Path(path))
    layers = record.layers if layers is None else layers
    heads = range(record.n_head) if heads is None else heads
    n_maps = max(len(layers), len(heads))
    side = 3.0 if n_maps == 1 else max(1.0, min(2.2, 12 / n_maps))  # inches
    n_cells = int(side * _DPI / 2)
    gap, left, right, top, bottom = 0.28, 0.45, 0.75, 0.7, 0.1
    width = max(left + len(heads) * (side + gap) + right, 5.5)
    height = top + len(layers) * (side + gap) - gap + bottom
    figure = new_figure(width, height)
    for row, layer in enumerate(layers):
        for column, head in enumerate(heads):
            x, y = left + column * (side + gap), height - top - (row + 1) * side - row * gap
            axes = figure.add_axes((x / width, y / height, side / width, side / height))
            image = _show(axes, record.pooled(layer, head, n_cells).numpy(), record.n_tokens)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set(linewidth=0.4, color="#909090")
            axes.set_title(f"{layer}.{head}", fontsize=_SMALL, pad=3)
    last_column = left + len(heads) * (side + gap) - gap
    bar = figure.add_axes(
        ((last_column + 0.15) / width, (height - top - min(side, 2)) / height, 0.1 / width, min(side, 2) / height)
    )
    _scale(figure, image, bar)
    if title:
        name = _title(record, "heads named layer.head", layers[0], min(n_cells, record.n_tokens))
        figure.text(left / width, 1 - 0.12 / height, name, fontsize=_LARGE, va="top", parse_math=False)
    figure.text((left + last_column) / 2 / width, 0, "key (attended to)", ha="center", va="top", fontsize=_LARGE)
    middle = (height - top + bottom) / 2 / height
    figure.text(0.2 / width, middle, "query (attends)", ha="center", va="center", rotation=90, fontsize=_LARGE)
    save_figure(figure, Path(path))


def write_csv(record: AttentionRecord, layer: int, head: int, path: Path | str) -> None:
    """One head as CSV: a header of the keys' token texts, then a line a query with its token text and its weights.

    float32 values with all their digits. A band of rows is in memory at a time.
    """
    texts = [
        text if part else f"#{token_id}"
        for text, part, token_id in zip(_texts(record), record.info.token_bytes, record.info.token_ids, strict=True)
    ]
    blocks = record.row_blocks(layer, head)
    with replacing(Path(path)) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query \\ key", *texts])
        for rows, weights in blocks:
            for text, row in zip(texts[rows], weights.numpy(), strict=True):
                writer.writerow([text, *map(str, row)])


def provenance(record: AttentionRecord, layer: int, n_cells: int) -> tuple[str, str]:
    """Two lines on what made the map: path and kernel; dtype, checkpoint step, length and how cells are pooled."""
    info, n = record.layer_info(layer), record.n_tokens
    run = f"{record.info.dtype} · step {record.info.step} · {n} token{'s' if n > 1 else ''}"
    if n_cells < n:
        stride = -(-n // n_cells)
        run += f" · a cell is the maximum of {stride}×{stride} weights"
    return f"path {info.path} · kernel {info.kernel}", run


def _texts(record: AttentionRecord) -> list[str]:
    """Token texts as they are; a token that is a part of a character as its bytes."""
    texts = []
    for part, text in zip(record.info.token_bytes, record.info.token_texts, strict=True):
        is_whole = text.encode("utf-8", "surrogatepass") == part
        texts.append(text if is_whole else labels([part], [0])[0])
    return texts


def _title(record: AttentionRecord, name: str, layer: int, n_cells: int) -> str:
    path, run = provenance(record, layer, n_cells)
    return f"{name} · {path}\n{run}"


def _show(axes: Any, cells: Any, n_tokens: int) -> Any:
    """Draws cells (N, N), NaN where forbidden, on axes that count tokens."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("weight", HUE).with_extremes(bad=FORBIDDEN)
    stride = -(-n_tokens // len(cells))
    end = len(cells) * stride - 0.5
    return axes.imshow(cells, cmap=colours, vmin=0, vmax=1, interpolation="nearest", extent=(-0.5, end, end, -0.5))


def _scale(figure: "Figure", image: Any, axes: Any) -> None:
    bar = figure.colorbar(image, cax=axes, ticks=[0, 0.25, 0.5, 0.75, 1], format="{x:g}")
    bar.set_label("weight", fontsize=_LARGE)
    bar.ax.tick_params(labelsize=_SMALL, width=0.6)
    bar.outline.set_linewidth(0.6)


def new_figure(width: float, height: float) -> "Figure":
    # Figure itself, not pyplot: no global state, no window system, nothing to close.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI)


def _check_suffix(path: Path) -> None:
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise ValueError(f"{path}: a picture ends in {' or '.join(PICTURE_SUFFIXES)}")


def save_figure(figure: "Figure", path: Path) -> None:
    from matplotlib import rc_context

    # Text stays text in an SVG: it can be searched, and set in the font of the paper that it goes into.
    with replacing(path) as beside, rc_context({"svg.fonttype": "none"}):
        figure.savefig(beside, format=path.suffix.lower()[1:], bbox_inches="tight", pad_inches=0.1)
