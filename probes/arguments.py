"""What the flags of several commands have in common. Imports no torch."""

from pathlib import Path
from typing import Any, Literal


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
