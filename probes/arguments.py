"""What the flags of several commands have in common. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
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


class _Absent(str):
    """Empty, as an option that was not given: an empty one that was given is a mistake."""


@dataclass(frozen=True)
class OnText(OnModel):
    text: str = _Absent()
    """Text to look at."""
    file: str = _Absent()
    """File whose text is looked at (UTF-8)."""
    unknown: Literal["error", "skip"] = "error"
    """What to do with characters that the model has never seen."""

    def __post_init__(self) -> None:
        if self.text and self.file:
            raise ValueError("give --text or --file, not both")
        for name, value in (("text", self.text), ("file", self.file)):
            if not value and not isinstance(value, _Absent):
                raise ValueError(f"--{name} is empty; leave it out or give at least one token")

    def read_text(self) -> str:
        """What --text or --file holds. ValueError, one line, when it is nothing, unreadable or not UTF-8."""
        text = self.text
        try:
            if self.file:
                text = Path(self.file).read_text(encoding="utf-8-sig")
            text.encode("utf-8")  # what the shell passes may hold stray bytes
        except OSError as error:
            raise ValueError(f"cannot read --file {self.file}: {error.strerror}") from error
        except UnicodeError as error:
            raise ValueError(f"{self.file or '--text'} is not UTF-8 at {getattr(error, 'start', 0)}") from error
        if not text:
            raise ValueError("the text is empty; give --text or --file with at least one token")
        return text


def numbers(flag: str, text: str) -> list[int] | None:
    """`0,2` -> [0, 2]; None for all."""
    if text != "all" and not all(part.isdecimal() for part in text.split(",")):
        raise ValueError(f"{flag} {text} is no number from 0; give one, several such as 0,1, or all")
    return None if text == "all" else [int(part) for part in text.split(",")]


def check_output(output: str, suffixes: tuple[str, ...]) -> None:
    """ValueError unless a file with one of these suffixes can be written there."""
    path = Path(output)
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"give -o a file name that ends in {' or '.join(suffixes)}, not {output!r}")
    if not path.parent.is_dir():
        raise ValueError(f"-o {output}: there is no folder {path.parent}")


def tokens_of(run: Any, text: str, unknown: Literal["error", "skip"]) -> list[int]:
    """The tokens of a text for the model of this run. ValueError when there are none or too many."""
    tokens: list[int] = run.tokenizer.encode(text, unknown=unknown)
    if not tokens:
        raise ValueError("no token is left of the text; at least one is needed")
    limit = run.config.model.block_size
    if len(tokens) > limit:
        raise ValueError(f"the text has {len(tokens)} tokens; this model reads at most {limit} (model.block_size)")
    return tokens
