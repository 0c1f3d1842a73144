"""A large text file to GPT-2's tokens, beside tiktoken itself:  python benchmarks/data.py

Also what the loader takes of a step. First the tokens of a smaller text are compared with tiktoken's of the whole text.
"""

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # a script finds its own folder there, not the repository
from benchmarks.process import in_own_process, memory_bytes  # noqa: E402
from data.config import DataConfig  # noqa: E402
from data.pieces import PIECE_CHARS  # noqa: E402
from data.prepare import prepare  # noqa: E402
from data.pydocs import read_pydocs  # noqa: E402
from data.tokenizer import n_cores  # noqa: E402
from probes.table import Table, Value, print_table  # noqa: E402
from training.cli import exit_on_user_error, parse  # noqa: E402

COLUMNS = ("what", "seconds", "megabytes_per_second", "of_tiktoken", "peak_megabytes")


@dataclass(frozen=True)
class Benchmark:
    """Encoding a file with GPT-2's tokenizer on all cores, and the loader's share of a step."""

    megabytes: float = 100.0
    """Size of the text: Python's documentation, again and again from other places."""
    runs: int = 3
    """Runs; each measures tiktoken and glassgpt in turn."""
    step_milliseconds: float = 31.0
    """The step that the loader's time is compared with."""
    json: bool = False
    """Print one JSON object instead of a table."""


def write_text(path: Path, n_bytes: float) -> None:
    text = "\n\n".join(read_pydocs())
    with path.open("w", encoding="utf-8") as file:
        for i in itertools.count():
            file.write(text[37 * i % 1000 :][: max(0, int(n_bytes) - file.tell())])
            if file.tell() >= n_bytes:
                return


def glassgpt(path: Path, folder: Path) -> tuple[float, int]:
    """(seconds, peak bytes of the process) from the file to memory-mapped tokens, tokenizer and checksums included."""
    config = DataConfig(source=str(path), tokenizer="gpt2", cache_dir=str(folder))
    start = time.perf_counter()
    prepare(config, show_progress=False)
    return time.perf_counter() - start, memory_bytes("cpu", "VmHWM")  # its workers are threads: it is all of them


def alone(path: Path) -> tuple[float, int]:
    """The same for tiktoken: the text in memory, cut anywhere into as large pieces, lists of tokens."""
    text = path.read_text(encoding="utf-8")
    pieces = [text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS)]
    encoding = tiktoken.get_encoding("gpt2")
    start = time.perf_counter()
    encoding.encode_ordinary_batch(pieces, num_threads=n_cores())
    return time.perf_counter() - start, memory_bytes("cpu", "VmHWM")


def n_wrong(folder: Path) -> int:
    """Tokens of a text of some pieces that are not those of the text encoded in one."""
    path = folder / "checked.txt"
    write_text(path, 6 * PIECE_CHARS)
    config = DataConfig(source=str(path), tokenizer="gpt2", cache_dir=str(folder))
    got = prepare(config, show_progress=False).tokens
    right = np.array(tiktoken.get_encoding("gpt2").encode_ordinary(path.read_text(encoding="utf-8")))
    return abs(len(got) - len(right)) or int((got != right).sum())


def loader_seconds() -> float:
    """Of one batch of 32 windows of 256."""
    from data.loader import BatchLoader

    tokens = np.arange(10_000_000, dtype=np.uint16)
    loader, times = BatchLoader(tokens, block_size=256, batch_size=32, order="random", seed=1), []
    for _ in range(200):
        start = time.perf_counter()
        loader.next_batch()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Benchmark, arguments, "data.py")
    if options.megabytes <= 0 or options.runs < 1:
        raise ValueError("--megabytes must be above 0, and --runs at least 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if wrong := n_wrong(folder):
            print(f"{wrong} tokens are not tiktoken's: nothing is reported", file=sys.stderr)
            return 1
        path = folder / "text.txt"
        write_text(path, 1e6 * options.megabytes)
        theirs, ours = [], []
        for i in range(options.runs):
            theirs.append(in_own_process(alone, path, bare=True))
            ours.append(in_own_process(glassgpt, path, folder / str(i), bare=True))
        seconds = [statistics.median(run[0] for run in runs) for runs in (theirs, ours)]
        rate = statistics.median(a[0] / b[0] for a, b in zip(theirs, ours, strict=True))  # of runs beside each other
        rows: list[Sequence[Value]] = [
            ("tiktoken", seconds[0], options.megabytes / seconds[0], 1.0, max(run[1] for run in theirs) / 1e6),
            ("glassgpt", seconds[1], options.megabytes / seconds[1], rate, max(run[1] for run in ours) / 1e6),
        ]
    batch = in_own_process(loader_seconds)
    about = {"cores": n_cores(), "megabytes": options.megabytes, "loader_milliseconds": 1e3 * batch}
    about |= {"loader_share_of_step": 1e3 * batch / options.step_milliseconds}
    print_table(Table("text to GPT-2's tokens", COLUMNS, rows, about), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
