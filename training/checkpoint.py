"""Checkpoints, and the one place where a run directory is read.

A run directory holds config.toml, tokenizer.json, metrics.jsonl, pictures, and:

    last.pt       the newest state; previous.pt is the one before, kept in case last.pt is damaged
    best.pt       the parameters with the lowest validation loss so far

Files are written beside and renamed, so that a kill or a full disk leaves the old one. They hold tensors and plain
types only and are loaded with torch's weights_only unpickler: a checkpoint cannot run code.
"""

import hashlib
import os
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.tokenizer import Tokenizer
from model import GPT
from training.cli import one_line
from training.config import Config

if TYPE_CHECKING:
    from data.prepare import Corpus
    from training.state import TrainState

FORMAT = 1
# What a resumed run may change of its model: nothing that the parameters depend on.
_CHANGEABLE = {
    *("dropout", "attention_dropout", "attention", "window", "n_global", "full_attention_every"),
    *("flash_kernel", "linear_feature_map"),
}


@dataclass(frozen=True)
class Run:
    """A trained model with all that is needed to use it."""

    model: GPT
    tokenizer: Tokenizer
    config: Config
    step: int
    checkpoint_path: Path
    val_loss: float

    @cached_property
    def checkpoint_hash(self) -> str:
        """SHA-256 of the checkpoint file, hex."""
        with open(self.checkpoint_path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @property
    def dtype(self) -> str:
        """Of the parameters as loaded."""
        return "float32"


def load_run(directory: str | Path, which: str = "best", device: str = "cpu") -> Run:
    """Reads a run: model in eval mode and float32, tokenizer, config. `which` is best or last.

    Looks at nothing but the directory. ValueError when it is no run or holds no readable checkpoint.
    """
    if which not in ("best", "last"):
        raise ValueError(f"checkpoint {which!r}; choose best or last")
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"no run directory {directory}; runs here: {', '.join(_runs_beside(directory)) or 'none'}")
    names = ["best.pt", "last.pt", "previous.pt"] if which == "best" else ["last.pt", "previous.pt"]
    path, content = _load_first(directory, names)
    config = Config.from_dict(content["config"])
    model = GPT(config.model)
    _load_parameters(model, content["model"], path)
    tokenizer = Tokenizer.from_dict(content["tokenizer"])
    return Run(model.to(device).eval(), tokenizer, config, content["step"], path, content["val_loss"])


def save_checkpoint(directory: Path, name: str, content: dict[str, Any]) -> None:
    """Writes `name` into the run directory, or leaves the one that is there. ValueError when it cannot be written."""
    path, beside = directory / name, directory / f"{name}.tmp"
    try:
        with open(beside, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        if name == "last.pt" and path.exists():
            os.replace(path, directory / "previous.pt")
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        beside.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"could not save {path}: {reason}; the checkpoint before it stays") from error


def load_for_resume(directory: Path, config: Config, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The newest readable training state, or None when the directory holds no checkpoint.

    ValueError, with the differences, when the architecture or the tokenizer is another one.
    """
    if not any((directory / name).exists() for name in ("last.pt", "previous.pt")):
        return None
    path, content = _load_first(directory, ["last.pt", "previous.pt"])
    if path.name == "previous.pt" and (directory / "last.pt").exists():
        # The next save renames last.pt to previous.pt: a damaged file must not take the place of the good one.
        os.replace(directory / "last.pt", directory / "damaged.pt")
    there = Config.from_dict(content["config"]).to_dict()["model"]
    here = config.to_dict()["model"]
    changed = [f"{key} {there[key]} -> {here[key]}" for key in there if there[key] != here[key]]
    changed = [text for text in changed if text.split()[0] not in _CHANGEABLE]
    if tokenizer.hash != Tokenizer.from_dict(content["tokenizer"]).hash:
        changed.append(f"tokenizer {content['tokenizer'].get('name')} -> {tokenizer.name} (or its vocabulary)")
    if changed:
        raise ValueError(
            f"{path} was trained with another model: {'; '.join(changed)}. "
            f"Give the old values, another --run.dir, or --run.resume never"
        )
    return content


def restore(config: Config, state: "TrainState", corpus: "Corpus", say: Callable[[str], None]) -> Path:
    """Continues from the run directory's checkpoint, as run.resume says; returns the directory, made ready."""
    directory, resume, runtime = Path(config.run.dir), config.run.resume, state.runtime
    with runtime.main_first():
        if resume == "never" and runtime.is_main and directory.exists():
            say(f"moved the earlier {directory} to {move_aside(directory)}")
    content = load_for_resume(directory, config, corpus.tokenizer)
    if content is not None:
        try:
            state.load(content)
        except Exception as error:  # a training state of another kind can fail in any way
            reason = one_line(f"{type(error).__name__}: {error}")[:120]
            raise ValueError(f"cannot resume from {directory} ({reason}); --run.resume never starts afresh") from error
        say(f"resuming {directory} after step {state.step}")
        if content.get("data_fingerprint") != corpus.fingerprint:
            say("note: the training text is not the one that this run began with")
    elif resume == "must":
        raise ValueError(f"run.resume is must, but {directory} holds no checkpoint; --run.resume auto would start one")
    if runtime.is_main:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        corpus.tokenizer.save(directory / "tokenizer.json")
    return directory


def move_aside(directory: Path) -> Path:
    """Renames a run directory to the first free NAME.old-N, so that a fresh start loses nothing."""
    n = 1
    while (target := directory.with_name(f"{directory.name}.old-{n}")).exists():
        n += 1
    directory.rename(target)
    return target


def _load_first(directory: Path, names: Iterable[str]) -> tuple[Path, dict[str, Any]]:
    damaged = []
    for path in (directory / name for name in names):
        if not path.exists():
            continue
        try:
            content = _load(path)
        except Exception as error:  # a damaged file can fail in any way
            reason = one_line(str(error).partition("\n")[0] or type(error).__name__)
            damaged.append(f"{path} is damaged ({reason[:120]})")
            continue
        if damaged:
            print(f"{'; '.join(damaged)}; taking {path.name} of step {content['step']}", file=sys.stderr)
        return path, content
    if damaged:
        raise ValueError(f"{'; '.join(damaged)}; no other checkpoint is left in {directory}")
    raise ValueError(f"{directory} holds no checkpoint; train one with: python train.py --run.dir {directory}")


def _load(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums that torch.save wrote
        if (name := archive.testzip()) is not None:
            raise ValueError(f"checksum of {name} is off")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if content.get("format") != FORMAT:
        raise ValueError(f"format {content.get('format')}, this version reads {FORMAT}")
    missing = {"config", "model", "step", "tokenizer", "val_loss"} - set(content)
    if path.name != "best.pt":
        missing |= {"training"} - set(content)
    if missing:
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    if not (type(content["step"]) is int and type(content["val_loss"]) is float):
        raise ValueError("its step or its loss is no number")
    return content


def _load_parameters(model: GPT, parameters: dict[str, Any], path: Path) -> None:
    try:
        model.load_state_dict(parameters)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"the parameters in {path} do not fit its configuration: {error}") from error


def _runs_beside(directory: Path) -> list[str]:
    folders = {directory.parent, Path("runs")}
    return sorted({str(path.parent) for folder in folders for path in folder.glob("*/last.pt")})
