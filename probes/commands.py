"""What `probe.py` can be asked: one class a sub-command, its fields are the flags. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from probes.arguments import OnModel, OnText, Output, Source, check_output


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
    title: bool = True
    """Say above a picture what made it."""


@dataclass(frozen=True)
class Page(OnText):
    """Writes one HTML file to walk through attention in a browser: every head, exact weights, no network."""

    source: tyro.conf.Positional[Source] = ""
    """A record, or a run directory; without --text and --file the records that training kept (--probe.interval), else
    the run's own text."""
    output: Output = "page.html"
    """The page to write."""
    layers: str = "all"
    """Which layers to show, such as 0,1."""


@dataclass(frozen=True)
class Serve(OnText):
    """Serves the same page on this machine, for texts of any length: a map is made where it is looked at."""

    source: tyro.conf.Positional[Source] = ""
    """A record, or a run directory as for page."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is this machine alone."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port is {self.port}; it must be 0 to 65535")


@dataclass(frozen=True)
class Check(OnModel):
    """Measures whether a model keeps its promises: causality, mask, scale, cached decoding. Exit code 1 if not."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory."""


@dataclass(frozen=True)
class Ablate(OnText):
    """Measures how much each head matters: the change of the loss when its output is replaced."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory. Without --text and --file: the validation part of its own data."""
    heads: str = "all"
    """Heads such as 1.3,2.0 (layer.head), or all."""
    how: Literal["zero", "mean", "resample"] = "zero"
    """Replace by zero, by the head's mean output, or by its output on another example."""
    keep_patterns: bool = False
    """Keep the attention maps of later layers as they were: only values feel the change."""
    repeated: bool = False
    """On sequences of random tokens that come twice: the loss of the second copies, which induction lowers."""
    tokens: int = 8192
    """Use at most so many tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeated and (self.text or self.file):
            raise ValueError("--repeated draws its own tokens; leave out --text and --file")
        if self.tokens < 2:
            raise ValueError(f"--tokens is {self.tokens}; a loss needs at least 2")

    @property
    def is_default(self) -> bool:
        """Of every head, on the run's own data: what the page shows beside the heads."""
        return self.heads == "all" and not (self.keep_patterns or self.repeated or self.text or self.file)


@dataclass(frozen=True)
class Knockout(OnText):
    """Cuts edges between positions: the change of the next token's probabilities when a query may not see a key."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory."""
    queries: Annotated[str, tyro.conf.arg(name="from")] = "last"
    """Positions that may no longer attend, such as 5,6; the first token is 0."""
    keys: Annotated[str, tyro.conf.arg(name="to")] = ""
    """Positions that they may no longer attend to."""
    layers: str = "all"
    """In which layers, such as 0,1."""
    rank: bool = False
    """Cut every edge of one query instead, head by head: does the weight of an edge tell its effect?"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank and (self.keys or self.layers != "all" or "," in self.queries):
            raise ValueError("--rank tries every edge of one query in every layer; beside it give at most --from")
        if "all" in (self.queries, self.keys):
            raise ValueError("--from and --to take positions, not all: a query must keep a key")


@dataclass(frozen=True)
class Patch(OnModel):
    """Puts parts of a clean run into a corrupted one: how much of the answer does each bring back?"""

    source: tyro.conf.Positional[Source] = ""
    """Run directory."""
    clean: str = ""
    """Text that makes the model answer."""
    corrupt: str = ""
    """Text of as many tokens that does not."""
    answer: str = ""
    """The token that the clean text makes likely."""
    other: str = ""
    """The token that it is measured against."""
    output: Output = ""
    """Picture (*.png, *.svg) to write."""


@dataclass(frozen=True)
class Lens(OnText):
    """Shows what the model would predict after each layer; with --target, what each part adds to that token's logit."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory."""
    target: str = ""
    """Token whose logit is taken apart."""
    other: str = ""
    """Token whose logit is subtracted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.other and not self.target:
            raise ValueError("--other is subtracted from --target; give both")


@dataclass(frozen=True)
class Heads(OnText):
    """Scores every head for what it might do, on random repeated tokens and on text; names the roles that it earns."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory. Without --text and --file the text is of the validation part of its own data."""
    sort: str = ""
    """Column to sort by, largest first, such as induction."""
    draws: int = 10
    """Draws of random tokens that prefix matching is the mean of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws < 1:
            raise ValueError(f"--draws is {self.draws}; prefix matching needs at least 1")


@dataclass(frozen=True)
class Stats(OnText):
    """Shows where each head looks: entropy, distance, first token, largest weight. Any length, no map is held."""

    source: tyro.conf.Positional[Source] = ""
    """A record, or a run directory; without --text and --file the validation part of its own data."""
    sort: str = ""
    """Column to sort by, largest first."""


@dataclass(frozen=True)
class Rollout(OnText):
    """Shows how much of each input token reaches a row through all layers, residual connections included."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory."""
    rows: str = "last"
    """Positions such as 5,6, last, or all."""
    top: int = 10
    """Show the heaviest so many tokens of each row; 0 shows all."""
    norms: bool = False
    """Count each weight times the length of what it carries."""


@dataclass(frozen=True)
class Compare(OnText):
    """Shows what differs between two runs, two records, the best and the last checkpoint, or two steps of a run."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory or record."""
    other: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]] = ""
    """The second one; none compares the best with the last checkpoint of the first."""
    steps: str = ""
    """Two steps such as 250,500 whose records training has kept (--probe.interval)."""
    sort: str = ""
    """Column to sort by, largest first."""


@dataclass(frozen=True)
class Timeline(OnModel):
    """Shows when in training each role formed, from the scores that --probe.interval wrote."""

    source: tyro.conf.Positional[Source] = ""
    """Run directory."""
    output: Output = ""
    """Picture (*.png, *.svg) to write."""


# Not with |: for such a union tyro loads a checker of types, which takes as long as all else that --help does.
Command: Any = Union[  # noqa: UP007
    Capture, Map, Page, Serve, Check, Ablate, Knockout, Patch, Lens, Heads, Stats, Rollout, Compare, Timeline
]


def check_map(command: Map) -> None:
    """ValueError for what `map` cannot write."""
    if command.output:
        check_output(command.output, (".png", ".svg", ".csv"))
    is_table = command.output.lower().endswith(".csv") or command.json
    if is_table and not (command.layer.isdecimal() and command.head.isdecimal()):
        raise ValueError("a table holds one head; give --layer and --head")
