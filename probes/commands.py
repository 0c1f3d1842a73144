"""What `probe.py` can be asked: one class a sub-command, its fields are the flags. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

# A required positional would hide what tyro says about a mistyped flag; an empty one is refused in main.
Source = Annotated[str, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]
Output = Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")]


@dataclass(frozen=True)
class OnModel:
    checkpoint: Literal["best", "last"] = "best"
    """The parameters of the lowest validation loss, or the newest."""
    device: str = "cpu"
    """cpu, cuda, cuda:N, mps or auto."""
    json: bool = False
    """Print one JSON object instead of text."""


@dataclass(frozen=True)
class OnText(OnModel):
    text: str = ""
    """Text to look at."""
    file: str = ""
    """File whose text is looked at (UTF-8)."""
    unknown: Literal["error", "skip"] = "error"
    """What to do with characters that the model has never seen."""

    def __post_init__(self) -> None:
        if self.text and self.file:
            raise ValueError("give --text or --file, not both")


@dataclass(frozen=True)
class Capture(OnText):
    """Runs a model once on a text and keeps what every attention map follows from: q, k and each row's log-sum-exp."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory."""
    output: Output = ""
    """The record to write, *.safetensors."""
    layers: str = "all"
    """Which layers to keep, such as 0,1."""
    values: bool = False
    """Keep the values v too."""


@dataclass(frozen=True)
class Map(OnText):
    """Draws attention: rows are queries, columns keys. Without -o in the terminal."""

    source: tyro.conf.Positional[Source] = ""
    """A record, or a run directory with --text or --file."""
    layer: str = "all"
    """Number of the layer, several such as 0,1, or all."""
    head: str = "all"
    """Number of the head, several, or all. More than one make a grid of thumbnails named layer.head."""
    output: Output = ""
    """Picture (*.png, *.svg) or, for one head, table (*.csv) to write."""


@dataclass(frozen=True)
class Check(OnModel):
    """Measures whether a model keeps its promises: causality, mask, scale, cached decoding. Exit code 1 if not."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory."""


Command: Any = Capture | Map | Check
