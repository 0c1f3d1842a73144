"""Time from `python train.py` to a checkpoint that scores a loss:  python benchmarks/time_to_loss.py

Our preset against nanoGPT's CPU recipe, whole processes in turn. Every checkpoint is then scored by code of its own;
when one of the preset's misses the loss, nothing is reported.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # a script finds its own folder there, not the repository
from benchmarks.process import run_training  # noqa: E402
from probes.table import Table, print_table  # noqa: E402
from training.cli import exit_on_user_error, parse  # noqa: E402


@dataclass(frozen=True)
class Benchmark:
    """Seconds to a loss over the whole validation split: a preset against a baseline."""

    source: str = "shakespeare"
    """Text, as in --data.source."""
    preset: str = "configs/shakespeare_quick.toml"
    """What is measured."""
    baseline: str = "configs/nanogpt_cpu.toml"
    """What it is compared with; its run counts whole, also where its seed ends a little above the loss."""
    loss: float = 1.898
    """Loss that every checkpoint of the preset must reach, in nats a token."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """One run of each for every seed; medians count."""
    flags: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Further flags of train.py for both, as --flags=--train.max_steps=4."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True)
class Result:
    """Of one run: seconds in all and to its best checkpoint, milliseconds a step, and that checkpoint's loss."""

    seconds: float
    checkpoint_seconds: float
    step_milliseconds: float
    loss: float


def measure(options: Benchmark, config: str, seed: int, folder: Path) -> Result:
    """One whole process."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    start, began = time.perf_counter(), time.time()
    row = run_training(config, run, *options.flags, f"--run.seed={seed}", f"--data.source={options.source}")
    seconds = time.perf_counter() - start
    written = (run / "best.pt").stat().st_mtime - began
    return Result(seconds, written, 1e3 * row["seconds"] / row["step"], score(run))


def score(run: Path) -> float:
    """Mean loss of best.pt over the whole validation split, each character once, in windows of block_size that start
    afresh: in float32, one window after the other, by none of the code that training evaluates with."""
    import torch

    from data.prepare import prepare
    from training.checkpoint import load_run

    loaded = load_run(run)
    corpus = prepare(loaded.config.data, show_progress=False)
    tokens = torch.tensor(corpus.tokens[int(len(corpus.tokens) * (1 - loaded.config.data.val_fraction)) :].tolist())
    nats, size = 0.0, loaded.config.model.block_size
    with torch.no_grad():
        for first in range(0, len(tokens) - 1, size):
            targets = tokens[first + 1 : first + size + 1]
            log_p = loaded.model(tokens[None, first : first + len(targets)])[0].log_softmax(-1)
            nats -= log_p[torch.arange(len(targets)), targets].sum().item()
    return nats / (len(tokens) - 1)


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Benchmark, arguments, "time_to_loss.py")
    if not options.seeds:
        raise ValueError("--seeds names none")
    if options.preset == options.baseline:
        raise ValueError(f"--preset and --baseline are both {options.preset}; two are needed to compare")
    results: dict[str, list[Result]] = {options.preset: [], options.baseline: []}
    with tempfile.TemporaryDirectory() as folder:
        warm_up = (*options.flags, "--train.max_steps=1", "--train.eval_tokens=64", "--log.sample_tokens=0")
        measure(replace(options, flags=warm_up), options.preset, 0, Path(folder))  # data into the cache
        for seed in options.seeds:
            for config, some in results.items():
                some.append(measure(options, config, seed, Path(folder)))
    if not (worst := max(result.loss for result in results[options.preset])) <= options.loss:
        print(f"{options.preset} reaches {worst:.4f}, not {options.loss}: nothing is reported", file=sys.stderr)
        return 1
    rows = [
        (config, seed, one.seconds, one.checkpoint_seconds, one.step_milliseconds, one.loss)
        for config, some in results.items()
        for seed, one in zip(options.seeds, some, strict=True)
    ]
    median = {
        (config, field): statistics.median(getattr(one, field) for one in some)
        for config, some in results.items()
        for field in ("seconds", "checkpoint_seconds")
    }
    about = {
        f"times_sooner_{field}": median[options.baseline, field] / median[options.preset, field]
        for field in ("seconds", "checkpoint_seconds")
    }
    columns = ("configuration", "seed", "seconds", "checkpoint_seconds", "step_milliseconds", "loss")
    print_table(Table(f"time to a loss of {options.loss}", columns, rows, about), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
