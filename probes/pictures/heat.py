"""Activation patching as two heat maps: layer × position and layer × head."""

from collections.abc import Sequence
from pathlib import Path

from probes.causal.effects import Patches
from probes.pictures.draw import new_figure, save_figure
from probes.pictures.labels import escape_missing, fonts_for

_MOST_LABELS = 64


def draw_patches(patches: Patches, names: Sequence[str], path: Path | str) -> None:
    """Both kinds of scores as PNG or SVG, by the suffix of `path`. White is 0, blue what the clean run
    restores, red what makes the difference worse; the ends are ±1, or the largest score beyond. names: of positions."""
    stream, heads = patches.stream, patches.heads  # (L, T), (L, H)
    n_layer, n_tokens = stream.shape
    n_head = heads.shape[1]
    cell = 0.3 if n_tokens <= _MOST_LABELS else 18 / n_tokens  # inches
    widths, height = (max(1.5, n_tokens * cell), max(1.2, n_head * 0.3)), max(1.0, n_layer * 0.3)
    figure = new_figure(sum(widths) + 2.6, height + 1.8)
    limit = max(1.0, float(stream.abs().max()), float(heads.abs().max()))
    left = 0.6
    kinds = ((stream, widths[0], "position", "stream that enters"), (heads, widths[1], "head", "output"))
    for scores, width, label, title in kinds:
        place = (left / (sum(widths) + 2.6), 1.2 / (height + 1.8), width / (sum(widths) + 2.6), height / (height + 1.8))
        axes = figure.add_axes(place)
        shown = axes.imshow(
            scores.numpy(), cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
        )
        axes.set_xlabel(label)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_ylabel("layer")
        axes.set_yticks(range(n_layer))
        if label == "head":
            axes.set_xticks(range(n_head))
        elif n_tokens <= _MOST_LABELS:
            fonts, drawable = fonts_for(names)
            shown_names = [escape_missing(name, drawable) for name in names]
            axes.set_xticks(range(n_tokens), shown_names, rotation=90, fontsize=8, fontfamily=fonts, parse_math=False)
        left += width + 0.7
    bar = figure.add_axes(((left - 0.5) / (sum(widths) + 2.6), 1.2 / (height + 1.8), 0.02, height / (height + 1.8)))
    figure.colorbar(shown, cax=bar, label="share restored")
    save_figure(figure, Path(path))
