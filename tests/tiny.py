"""A run small enough to be trained inside a test."""

import os
import subprocess
import sys
from pathlib import Path

from training.config import Config, parse_arguments

REPOSITORY = Path(__file__).resolve().parents[1]
TEXT = "".join(f"{a} times {b} is {a * b}.\n" for a in range(20) for b in range(11))  # 3,000 characters, 18 of them

_VALUES = {
    "run": {"device": "cpu", "dtype": "float32", "compile": "off"},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16},
    "data": {"tokenizer": "char"},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 4},
    "train": {"max_steps": 20, "batch_size": 4, "log_interval": 1, "eval_interval": 5, "checkpoint_interval": 5},
    "log": {"progress": False, "sample_tokens": 0},
    "probe": {"max_tokens": 0},
}


def tiny_flags(folder: Path, run: str = "run", **changes: object) -> list[str]:
    """Flags of a run in folder/run on a text in folder. Changes go by the name of a setting, without its section."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT, encoding="utf-8")
    values = {section: dict(settings) for section, settings in _VALUES.items()}
    values["run"]["dir"] = str(folder / run)
    values["data"] |= {"source": str(text), "cache_dir": str(folder / "cache")}
    sections = {name: section for section, settings in Config().to_dict().items() for name in settings}
    for name, value in changes.items():
        values[sections[name]][name] = value
    return [f"--{section}.{name}={value}" for section, some in values.items() for name, value in some.items()]


def tiny_config(folder: Path, run: str = "run", **changes: object) -> Config:
    return parse_arguments(tiny_flags(folder, run, **changes), "train.py")


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A Python process in the repository, its output kept apart."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s; stdout {out!r}, stderr {err!r}") from None
    return process.returncode, out, err
