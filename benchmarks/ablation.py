"""What each ingredient of the quick preset earns:  python benchmarks/ablation.py --source tinyshakespeare.txt

The preset without one ingredient at a time, and the plain recipe with one at a time, over several seeds: same size of
model, same steps. Losses do not depend on how busy the machine is; the milliseconds a step are one thread's.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # a script finds its own folder there, not the repository
from benchmarks.process import configuration, run_training  # noqa: E402
from data.tokenizer import n_cores  # noqa: E402
from probes.table import Table, print_table  # noqa: E402
from training.cli import exit_on_user_error, parse  # noqa: E402
from training.config import parse_arguments  # noqa: E402

# ingredient: (flags that put it in, flags that leave it out)
INGREDIENTS = {
    "Muon": (
        "--optimizer.name=muon --optimizer.learning_rate=0.01",
        "--optimizer.name=adamw --optimizer.learning_rate=0.005",
    ),
    "embedding norm": ("--model.embedding_norm=True", "--model.embedding_norm=False"),
    "previous token": ("--model.previous_embedding=True", "--model.previous_embedding=False"),
    "RoPE": ("--model.position=rope", "--model.position=learned"),
    "zero outputs": ("--model.zero_outputs=True", "--model.zero_outputs=False"),
    "untied head": ("--model.tied_head=False", "--model.tied_head=True"),
    "ReLU²": ("--model.mlp=relu2", "--model.mlp=gelu"),
    "QK-norm": ("--model.qk_norm=True", "--model.qk_norm=False"),
    "RMSNorm": ("--model.norm=rmsnorm", "--model.norm=layernorm"),
    "linear decay": ("--optimizer.schedule=linear", "--optimizer.schedule=cosine"),
    "betas 0.8, 0.95": (
        "--optimizer.beta1=0.8 --optimizer.beta2=0.95",
        "--optimizer.beta1=0.9 --optimizer.beta2=0.99",
    ),
    "logit softcap 15": ("--model.logit_softcap=15", "--model.logit_softcap=0"),
}


@dataclass(frozen=True)
class Benchmark:
    """Final loss of the preset with each ingredient alone off, and of the plain recipe with each alone on."""

    source: str = "shakespeare"
    """Text, as in --data.source."""
    preset: str = "configs/shakespeare_quick.toml"
    """Configuration that has the ingredients."""
    steps: int = 0
    """Steps of each run; 0 takes the preset's."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """A run for each."""
    start: Literal["preset", "plain", "both"] = "both"
    """Ingredients are taken from the preset, put into the plain recipe, or both."""
    only: tuple[str, ...] = ()
    """Ingredients to look at; none given means all."""
    jobs: int = n_cores()
    """Runs at once, of one thread each, which is what other work on the machine disturbs least."""
    json: bool = False
    """Print one JSON object instead of a table."""


def result_of(options: Benchmark, run: tuple[Sequence[str], int]) -> tuple[float, float]:
    """(flags, seed) -> the final validation loss, over the whole split, and the milliseconds a step."""
    flags, seed = run
    with tempfile.TemporaryDirectory() as folder:
        steps = [f"--train.max_steps={options.steps}"] if options.steps else []
        fixed = [f"--run.seed={seed}", f"--data.source={options.source}", "--train.eval_tokens=0"]
        fixed += ["--log.sample_tokens=0", "--probe.max_tokens=0", "--train.eval_interval=100000"]
        row = run_training(options.preset, Path(folder, "run"), *fixed, *steps, *flags, OMP_NUM_THREADS="1")
        return row["val_loss"], 1e3 * row["seconds"] / row["step"]


def variants(options: Benchmark) -> dict[tuple[str, str], list[str]]:
    """(start, what is changed) -> flags."""
    names = options.only or tuple(INGREDIENTS)
    plain = [flag for name in INGREDIENTS for flag in INGREDIENTS[name][1].split()]
    found: dict[tuple[str, str], list[str]] = {}
    if options.start != "plain":
        found["preset", ""] = []
        preset = configuration(options.preset)
        for name in names:
            without = [preset, *INGREDIENTS[name][1].split()]
            is_in = parse_arguments(without, "train.py") != parse_arguments([preset], "train.py")
            found["preset", f"{'without' if is_in else 'with'} {name}"] = INGREDIENTS[name][is_in].split()
    if options.start != "preset":
        found["plain", ""] = plain
        found |= {("plain", f"with {name}"): [*plain, *INGREDIENTS[name][0].split()] for name in names}
    return found


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Benchmark, arguments, "ablation.py")
    if unknown := sorted(set(options.only) - set(INGREDIENTS)):
        raise ValueError(f"--only names {unknown[0]!r}; choose from: {', '.join(INGREDIENTS)}")
    if not options.seeds or options.jobs < 1:
        raise ValueError(f"got {len(options.seeds)} --seeds and --jobs {options.jobs}; at least one of each is needed")
    flags = variants(options)
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(product(flags.values(), options.seeds))
        results = list(tqdm(pool.map(partial(result_of, options), runs), total=len(runs), unit="run"))
    rows, means, n_seeds = [], {}, len(options.seeds)
    for i, (start, change) in enumerate(flags):
        losses, times = zip(*results[i * n_seeds : (i + 1) * n_seeds], strict=True)
        mean, deviation = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
        means[start, change] = mean
        rows.append((start, change, mean, deviation, mean - means[start, ""], statistics.median(times)))
    about = {"seeds": list(options.seeds), "steps": options.steps or "the preset's", "jobs": options.jobs}
    columns = ("start", "change", "loss", "deviation", "difference", "step_milliseconds")
    print_table(Table("validation loss, each ingredient alone", columns, rows, about), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
