"""Tokens a second of sampling, beside what memory allows and beside transformers:  python benchmarks/sampling.py

The limit: a token cannot be quicker than reading the weights once. The rate of reading is measured in the same process,
between the measurements of sampling. First the tokens are checked with the logits of the model without a cache.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # a script finds its own folder there, not the repository
from benchmarks.process import in_own_process  # noqa: E402
from benchmarks.step_speed import spread  # noqa: E402
from data.tokenizer import n_cores  # noqa: E402
from model import GPT, ModelConfig  # noqa: E402
from model.config import SamplingConfig  # noqa: E402
from model.generate import generate  # noqa: E402
from probes.table import Table, Value, print_table  # noqa: E402
from training.cli import exit_on_user_error, parse  # noqa: E402
from training.runtime import Runtime, choose_dtype  # noqa: E402

Dtype = Literal["float32", "bfloat16"]
# How far the logit of a token may lie below the highest, in standard deviations of logits: roundings make near ties.
SHORTFALL = {"float32": 1e-3, "bfloat16": 0.1}
GREEDY = SamplingConfig(temperature=0)
# sizes, and the tokens of the prompt: the newest of a block's tokens are made
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "tiny": (dict(n_layer=2, n_head=2, n_embd=32, vocab_size=65, block_size=64), 16),
    "baby": (dict(n_layer=6, n_head=6, n_embd=384, vocab_size=65, block_size=256), 16),
    "gpt2": (dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, block_size=1024, bias=True), 924),
}
COLUMNS = ("model", "tool", "dtype", "batch", "tokens_per_second", "of_limit", "of_transformers", "of_batch_1")


@dataclass(frozen=True)
class Benchmark:
    """Tokens a second, greedy, random weights: medians over the runs of the median token. With transformers where it is
    installed; of_transformers is against its quickest."""

    models: tuple[str, ...] = ("baby", "gpt2")
    """baby: 10.65 M parameters, context from 16. gpt2: GPT-2's 124 M, context from 924. tiny: to try it out."""
    batches: tuple[int, ...] = (1, 16)
    """Sequences at once."""
    dtypes: tuple[Dtype, ...] = get_args(Dtype)
    """Number types of the products."""
    max_new_tokens: int = 100
    """Tokens a run makes."""
    runs: int = 3
    """Runs; the limit is measured before each."""
    threads: int = n_cores()
    """Threads of all tools."""
    json: bool = False
    """Print one JSON object instead of a table."""


def ours(model: GPT, prompt: Tensor, n: int, dtype: str) -> Iterator[Tensor]:
    options: dict[str, Any] = {"sampling": GREEDY, "n_valid_tokens": model.config.vocab_size}
    cpu = torch.device("cpu")
    with Runtime(cpu, choose_dtype(dtype, cpu)).autocast():
        yield from generate(model, prompt, max_new_tokens=n, **options)


class Clock:
    """A streamer that transformers tells of every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def theirs(sizes: dict[str, Any], dtype: str) -> Callable[[Tensor, int], list[float]]:
    """transformers' GPT-2 of these sizes: (prompt, n) -> when each token was there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    names = {name: sizes[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    model = GPT2LMHeadModel(GPT2Config(**names, n_positions=sizes["block_size"], eos_token_id=None)).eval()
    model = model.to(getattr(torch, dtype))

    def run(prompt: Tensor, n: int) -> list[float]:
        if len(prompt) > 1:  # a streamer takes one sequence: the time of all tokens after the first is shared out
            ends = []
            for n_tokens in (1, n):
                start = time.perf_counter()
                model.generate(prompt, max_new_tokens=n_tokens, do_sample=False, pad_token_id=0)
                ends.append(time.perf_counter() - start)
            return [i * (ends[1] - ends[0]) / (n - 1) for i in range(n)]
        clock = Clock()
        model.generate(prompt, max_new_tokens=n, do_sample=False, pad_token_id=0, streamer=clock)
        return clock.times[1:]  # the first is the prompt's

    return run


def read_rate(n_bytes: int, width: int) -> float:
    """Bytes a second of the quickest way to read as many: a sum, or products with a vector."""
    numbers = torch.randn(n_bytes // 4 // width // 4 * 4, width)
    parts, column = numbers.view(4, -1, width), torch.randn(1, 1, width).expand(4, 1, -1).mT
    best = float("inf")
    for read in (numbers.sum, lambda: torch.mv(numbers, numbers[0]), lambda: torch.bmm(parts, column)):
        times = []
        for _ in range(12):
            start = time.perf_counter()
            read()
            times.append(time.perf_counter() - start)
        best = min(best, statistics.median(times[2:]))
    return numbers.nbytes / best


def token_rate(times: list[float], batch: int) -> float:
    gaps = [after - before for before, after in pairwise(times)]
    return batch / statistics.median(gaps)


def measure(options: Benchmark, name: str, tool: str, dtype: str) -> dict[str, Any]:
    """Tokens a second for each batch, and the limit of batch 1."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    sizes, n_prompt = MODELS[name]
    model = GPT(ModelConfig(**sizes)).eval() if tool == "glassgpt" else None
    run = theirs(sizes, dtype) if tool == "transformers" else None
    # The table of positions is looked up, and so is an embedding that is no head; all else is read for each token.
    n_read = GPT(ModelConfig(**sizes)).n_parameters() - sizes["block_size"] * sizes["n_embd"]
    n_bytes = n_read * getattr(torch, dtype).itemsize
    limits: list[float] = []
    rates: dict[int, list[float]] = {batch: [] for batch in options.batches}
    for batch in options.batches:
        prompt = torch.randint(sizes["vocab_size"], (batch, n_prompt))
        for _ in range(options.runs):
            limits.append(read_rate(n_bytes, sizes["n_embd"]) / n_bytes)
            if model is not None:
                times = [time.perf_counter() for _ in ours(model, prompt, options.max_new_tokens, dtype)]
            else:
                assert run is not None
                times = run(prompt, options.max_new_tokens)
            rates[batch].append(token_rate(times[1:], batch))  # the second makes the decoder ready
    return {"limit": statistics.median(limits), "rates": {b: statistics.median(r) for b, r in rates.items()}}


@torch.no_grad()
def shortfall(name: str, batch: int, dtype: str) -> float:
    """Of 12 greedy tokens a row: how far the logit of one lies below the highest, by the model without a cache in
    float32, in standard deviations of logits."""
    sizes, n_prompt = MODELS[name]
    model = GPT(ModelConfig(**sizes)).eval()
    spread(model)
    prompt = torch.randint(sizes["vocab_size"], (batch, n_prompt))
    made = torch.stack(list(ours(model, prompt, 12, dtype)), dim=1)  # (B, 12)
    logits = model(torch.cat((prompt, made), dim=1)[:, :-1])[:, n_prompt - 1 :]
    return float((logits.amax(-1) - logits.gather(-1, made[..., None])[..., 0]).max() / logits.std())


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Benchmark, arguments, "sampling.py")
    if unknown := set(options.models) - set(MODELS):
        raise ValueError(f"--models {' '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    if not options.models or not options.dtypes or min(options.batches, default=0) < 1:
        raise ValueError("--models and --dtypes must name at least one, and --batches be at least 1")
    if min(options.runs, options.threads) < 1 or options.max_new_tokens < 4:
        raise ValueError("--runs and --threads must be at least 1, --max-new-tokens at least 4")
    room = {name: MODELS[name][0]["block_size"] - MODELS[name][1] for name in options.models}
    if options.max_new_tokens > (most := min(room.values())):
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}; the context has room for {most}")
    tools = [tool for tool in ("transformers", "glassgpt") if tool == "glassgpt" or find_spec(tool) is not None]
    rows: list[Sequence[Value]] = []
    limits = {}
    for name in options.models:
        for batch, dtype in product((1, 3), options.dtypes):
            if not (short := shortfall(name, batch, dtype)) <= SHORTFALL[dtype]:
                message = f"{name}, {dtype}: a greedy token lies {short:.2g} deviations below the best"
                print(f"{message} (at most {SHORTFALL[dtype]:g}): nothing is reported", file=sys.stderr)
                return 1
        results = {
            (tool, dtype): in_own_process(measure, options, name, tool, dtype)
            for tool, dtype in product(tools, options.dtypes)
        }
        for (tool, dtype), result in results.items():
            for batch, rate in result["rates"].items():
                peers = [other["rates"][batch] for (who, _), other in results.items() if who == "transformers"]
                share = rate / result["limit"] if batch == 1 else None
                bases = max(peers, default=None), result["rates"].get(1)
                rows.append((name, tool, dtype, batch, rate, share, *(rate / base if base else None for base in bases)))
        limits[name] = {dtype: results["glassgpt", dtype]["limit"] for dtype in options.dtypes}
    about = {"threads": options.threads, "limits_tokens_per_second": limits}
    print_table(Table("greedy sampling", COLUMNS, rows, about), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
