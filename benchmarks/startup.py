"""Seconds until the scripts answer:  python benchmarks/startup.py

Every row is a command in a process of its own, timed from its start to the sign that it is looked at for: its end, the
first line of its metrics, the first character of its text. A command that answers wrongly ends the benchmark.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # a script finds its own folder there, not the repository
from benchmarks.process import REPOSITORY, configuration  # noqa: E402
from probes.table import Table, Value, print_table  # noqa: E402
from training.cli import exit_on_user_error, parse  # noqa: E402

COLUMNS = ("command", "until", "seconds", "goal_seconds")
SHORT = ("--train.max_steps=1", "--log.sample_tokens=0", "--probe.max_tokens=0", "--train.eval_tokens=1000")


@dataclass(frozen=True)
class Benchmark:
    """Seconds until the scripts answer, medians over the runs."""

    config: str = "configs/quick.toml"
    """What train.py is given; its data is prepared before the first run."""
    runs: int = 3
    """Runs of each command."""
    json: bool = False
    """Print one JSON object instead of a table."""


def start(*arguments: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True)


def until_end(code: int, words: str, *arguments: str) -> float:
    """Seconds to the end of a command that says `words` and ends with `code`."""
    began = time.perf_counter()
    process = start(*arguments)
    out, err = process.communicate()
    seconds = time.perf_counter() - began
    if process.returncode != code or words not in out + err:
        raise ValueError(f"{' '.join(arguments)} ended with {process.returncode}: {(out + err)[-200:]}")
    return seconds


def until_metrics(folder: Path, *arguments: str) -> float:
    """Seconds to the first line of metrics.jsonl."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    began = time.perf_counter()
    process = start(*arguments)
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    _, err = process.communicate()
    if process.returncode or '"step": 1,' not in metrics.read_text(encoding="utf-8"):
        raise ValueError(f"{' '.join(arguments)} made no first step: {err[-200:]}")
    return seconds


def until_text(*arguments: str) -> float:
    """Seconds to the first character of the output."""
    began = time.perf_counter()
    process = start(*arguments)
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - began
    _, err = process.communicate()
    if process.returncode or not first:
        raise ValueError(f"{' '.join(arguments)} wrote no text: {err[-200:]}")
    return seconds


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Benchmark, arguments, "startup.py")
    if options.runs < 1:
        raise ValueError(f"--runs is {options.runs}; it must be at least 1")
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        config = str(Path(configuration(options.config)).resolve())
        train = ("train.py", config, f"--run.dir={run}", "--run.resume=never", *SHORT)
        until_end(0, "files:", *train)  # prepares the data, and leaves a run to sample from
        mistake = ("train.py", config, "--model.n_head=3", "--model.n_embd=128")
        cases: list[tuple[str, str, float, Callable[[], float]]] = [
            *((f"{s}.py --help", "end", 0.3, _help(f"{s}.py")) for s in ("train", "sample", "probe")),
            ("train.py with a wrong flag", "end", 0.3, lambda: until_end(2, "--modle", "train.py", "--modle.n_head=3")),
            ("train.py with a wrong value", "end", 0.3, lambda: until_end(2, "n_head could be", *mistake)),
            (f"train.py {options.config}", "step 1", 4.0, lambda: until_metrics(run, *train)),
            ("sample.py", "first token", 3.0, lambda: until_text("sample.py", str(run), "--max-new-tokens=20")),
        ]
        rows: list[Sequence[Value]] = []
        for command, sign, goal, seconds in cases:
            rows.append((command, sign, statistics.median(seconds() for _ in range(options.runs)), goal))
    print_table(Table("start-up", COLUMNS, rows, {"runs": options.runs}), as_json=options.json)
    return 0


def _help(script: str) -> Callable[[], float]:
    return lambda: until_end(0, "usage:", script, "--help")


if __name__ == "__main__":
    sys.exit(main())
