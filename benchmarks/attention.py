"""Time and memory of every attention path as the sequence doubles:  python benchmarks/attention.py -o attention.png

Each path is first compared with `reference`, or with its own weights when it is no softmax; a wrong one is refused.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # a script finds its own folder there, not the repository
from benchmarks.process import in_own_process, memory_bytes  # noqa: E402
from benchmarks.report import draw, fit, print_tables  # noqa: E402
from model.attention import available, build, path_class  # noqa: E402
from model.attention.mask import MaskRule  # noqa: E402
from model.attention.path import AttentionPath  # noqa: E402
from training.cli import exit_on_user_error, parse  # noqa: E402

DIRECTIONS = ("forward", "forward+backward")
RULE = MaskRule()
LIMITS = {"cpu": 1e-9, "cuda": 3e-2}  # of the error against float64: there in float64 too, here in bfloat16


@dataclass(frozen=True)
class Benchmark:
    """Time and memory of attention paths, one sequence, causal. Exponents are fitted to the three largest sizes."""

    paths: tuple[str, ...] = ()
    """Paths to measure; none given means all."""
    sizes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Numbers of tokens, ascending."""
    heads: int = 2
    """Number of heads."""
    head_dim: int = 64
    """Width of a head."""
    window: int = 256
    """Keys that a row of the path window sees."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure: float32 on cpu, bfloat16 on cuda."""
    threads: int = 1
    """Threads on cpu. One is what other work on the machine disturbs least."""
    repeat_seconds: float = 0.5
    """Each measurement is repeated for so long; its fastest run counts."""
    limit_seconds: float = 12.0
    """A measurement is left out when the size before foretells a longer run (four times its time)."""
    limit_gigabytes: float = 4.0
    """The same for memory."""
    json: bool = False
    """Print one JSON object instead of tables."""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = ""
    """Plot to write: *.png, *.svg or *.pdf."""


def new_path(options: Benchmark, name: str) -> AttentionPath:
    return build(name, window=options.window) if name == "window" else build(name)


def new_inputs(options: Benchmark, n_tokens: int, *, exact: bool = False) -> list[Tensor]:
    """q, k, v and what the gradient of the output shall be; `exact` is float64, where the device has it."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float64 if exact else torch.float32
    shape = (1, options.heads, n_tokens, options.head_dim)
    return [torch.randn(shape).to(options.device, dtype) for _ in range(4)]


def run(attend: Callable[..., Tensor], inputs: Sequence[Tensor], backward: bool) -> list[Tensor]:
    """The output, and with `backward` the gradients of q, k and v."""
    qkv, pull = [x.detach().requires_grad_(backward) for x in inputs[:3]], inputs[3]
    out = attend(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, pull)] if backward else [out]


def error_of(options: Benchmark, name: str) -> float:
    """Largest difference of output and gradients from the explicit form in float64, relative to its largest number."""
    path, backward = new_path(options, name), f"backward_{options.device}" in path_class(name).supports
    oracle = build("reference") if "log_sum_exp" in path.supports else path

    def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracle.weights(q, k, rule=path.rule_for(RULE)) @ v

    inputs = new_inputs(options, 2 * options.window + 44, exact=True)  # past the window, and no multiple of a tile
    wanted = run(explicit, [x.double() for x in inputs], backward)
    pairs = zip(run(partial(path, rule=RULE), inputs, backward), wanted, strict=True)
    return max(float((got.double() - right).abs().max() / right.abs().max()) for got, right in pairs)


def measure(options: Benchmark, name: str, n_tokens: int, backward: bool) -> tuple[float, int]:
    """(seconds, bytes beyond the inputs) of one run; the first run tells the memory, the fastest of all the time."""
    torch.set_num_threads(options.threads)
    attend = partial(new_path(options, name), rule=RULE)
    run(attend, new_inputs(options, min(512, n_tokens)), backward)  # libraries load
    inputs = new_inputs(options, n_tokens)
    if options.device == "cuda":
        run(attend, inputs, backward)  # kernels compile for this size
        torch.cuda.reset_peak_memory_stats()
    before = memory_bytes(options.device, "VmRSS")
    seconds, end, n_bytes = float("inf"), time.perf_counter() + options.repeat_seconds, 0
    while seconds == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        run(attend, inputs, backward)
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - start)
        n_bytes = n_bytes or max(1, memory_bytes(options.device, "VmHWM") - before)
    return seconds, n_bytes


def why_not(options: Benchmark, row: dict[str, Any], n_tokens: int) -> str:
    """Why a measurement is left out; empty when it is not. Twice the tokens take at most four times as much."""
    word = f"backward_{options.device}"
    if row["direction"] == DIRECTIONS[1] and word not in path_class(row["path"]).supports:
        return f"the path has no {word}"
    if row["n"] and 4 * row["seconds"][-1] > options.limit_seconds:
        return f"n = {n_tokens} may take over {options.limit_seconds:g} s"
    if row["n"] and 4 * row["bytes"][-1] > options.limit_gigabytes * 1e9:
        return f"n = {n_tokens} may take over {options.limit_gigabytes:g} GB"
    return ""


def measure_all(options: Benchmark, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each path and direction, with the sizes that were measured and why no larger ones were."""
    rows: list[dict[str, Any]] = [
        {"path": name, "direction": direction, "n": [], "seconds": [], "bytes": [], "skipped": ""}
        for name, direction in itertools.product(names, DIRECTIONS)
    ]
    console, columns = Console(stderr=True), (TextColumn("{task.description:40}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(rows) * sum(options.sizes))
        for n_tokens, row in itertools.product(options.sizes, rows):
            progress.update(task, description=f"{row['path']} {row['direction']}, n = {n_tokens}")
            row["skipped"] = row["skipped"] or why_not(options, row, n_tokens)
            if not row["skipped"]:
                try:
                    result = in_own_process(measure, options, row["path"], n_tokens, row["direction"] == DIRECTIONS[1])
                    for field, value in zip(("n", "seconds", "bytes"), (n_tokens, *result), strict=True):
                        row[field].append(value)
                except MemoryError as error:
                    row["skipped"] = f"n = {n_tokens}: {error}"
            progress.advance(task, n_tokens)
    return rows


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Benchmark, arguments, "attention.py")
    names = options.paths or available()
    if list(options.sizes) != sorted(set(options.sizes)) or min(options.sizes, default=0) < 1:
        raise ValueError(f"--sizes are {options.sizes}; they must be ascending and at least 1")
    if options.output and not options.output.endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"-o {options.output} must end in .png, .svg or .pdf")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA on this machine")
    for name in names:
        error, limit = error_of(options, name), LIMITS[options.device]
        if not error <= limit:
            print(f"path {name} is wrong by {error:.1e} (at most {limit:g}): nothing is reported", file=sys.stderr)
            return 1
    rows = [fit(row) for row in measure_all(options, names)]
    about = {word: getattr(options, word) for word in ("device", "threads", "heads", "head_dim", "window")}
    if options.json:
        print(json.dumps(about | {"rows": rows}))
    else:
        print_tables(rows, options.sizes, ", ".join(f"{name} {value}" for name, value in about.items()))
    if options.output:
        draw(rows, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
