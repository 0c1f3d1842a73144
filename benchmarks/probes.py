"""Time and memory to know what every head does, beside tools that hold the maps:  python benchmarks/probes.py

One pass of a GPT-2-sized model with random weights, then entropy, distance, sink and confidence of every head. First
all tools get the same weights and a short text; when their maps or statistics differ, nothing is reported.
"""

import importlib.util
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # a script finds its own folder there, not the repository
from benchmarks.process import in_own_process, memory_bytes  # noqa: E402
from model import GPT, ModelConfig  # noqa: E402
from model.gpt2_weights import from_gpt2  # noqa: E402
from probes.capture import capture  # noqa: E402
from probes.record import AttentionRecord  # noqa: E402
from probes.table import Table, Value, print_table  # noqa: E402
from training.cli import exit_on_user_error, parse  # noqa: E402

MODULES = {"glassgpt": "torch", "transformers": "transformers", "TransformerLens": "transformer_lens"}
STATISTICS = ("entropy", "distance", "sink", "confidence")
CHECKED_TOKENS, LIMIT = 300, 1e-4  # of a relative error, all in float32


@dataclass(frozen=True)
class Benchmark:
    """Capture and statistics of all heads, against transformers (eager maps) and, where installed, TransformerLens."""

    sizes: tuple[int, ...] = (1024, 4096)
    """Numbers of tokens to compare at."""
    layers: int = 12
    """Layers of the compared model."""
    heads: int = 12
    """Heads of a layer."""
    width: int = 768
    """Its n_embd."""
    vocabulary: int = 50257
    """Its vocab_size."""
    long: int = 32768
    """Tokens of one more capture, of a model of 6 layers and width 384; 0 leaves it out."""
    repeats: int = 3
    """Measurements of each tool, in turns; the medians are reported."""
    threads: int = 0
    """Threads; 0 leaves the number to torch, one a core."""
    json: bool = False
    """Print one JSON object instead of tables."""


def explicit(pattern: Tensor) -> Tensor:
    """One head's map (T, T) -> the means over rows of STATISTICS, (4,)."""
    places = torch.arange(len(pattern), dtype=pattern.dtype)
    distance = places - pattern @ places
    rows = (torch.special.entr(pattern).sum(-1), distance, pattern[:, 0], pattern.amax(-1))
    return torch.stack([row.mean() for row in rows])


def sizes_of(options: Benchmark) -> dict[str, Any]:
    """By the names that transformers and glassgpt share."""
    return dict(n_layer=options.layers, n_head=options.heads, n_embd=options.width, vocab_size=options.vocabulary)


def gpt2(options: Benchmark, n_tokens: int) -> Any:
    """transformers' GPT-2 with random weights and explicit attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = sizes_of(options) | {"n_positions": n_tokens, "attn_implementation": "eager"}
    return GPT2LMHeadModel(GPT2Config(**sizes)).eval()


def lens(options: Benchmark, n_tokens: int) -> Any:
    """TransformerLens' GPT-2 with random weights."""
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes: dict[str, Any] = {"n_layers": options.layers, "n_heads": options.heads, "d_model": options.width}
    sizes |= {"d_head": options.width // options.heads, "d_vocab": options.vocabulary, "n_ctx": n_tokens}
    return HookedTransformer(HookedTransformerConfig(**sizes, act_fn="gelu_new", normalization_type="LN")).eval()


def ours(options: Benchmark, n_tokens: int) -> GPT:
    return GPT(ModelConfig(**sizes_of(options), block_size=n_tokens, bias=True)).eval()


def maps(tool: str, model: Any, ids: Tensor) -> Sequence[Tensor]:
    """The maps (H, T, T) of every layer."""
    if tool == "transformers":
        return [layer[0] for layer in model(ids, output_attentions=True).attentions]
    _, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
    return [cache["pattern", layer][0] for layer in range(model.cfg.n_layers)]


BUILD: dict[str, Callable[[Benchmark, int], Any]] = {"glassgpt": ours, "transformers": gpt2, "TransformerLens": lens}


@torch.no_grad()
def answer(tool: str, model: Any, ids: Tensor) -> Tensor:
    """What is measured: ids (1, T) -> (layers · heads, 4)."""
    if tool == "glassgpt":
        record = capture(model, ids)
        heads = [record.statistics(layer, head) for layer in record.layers for head in range(record.n_head)]
        return torch.stack([torch.stack([getattr(rows, name).mean() for name in STATISTICS]) for rows in heads])
    return torch.stack([explicit(head) for layer in maps(tool, model, ids) for head in layer])


@torch.no_grad()
def error_of(options: Benchmark, tool: str) -> float:
    """Largest difference from the maps of transformers with the same weights, and from their statistics (relative)."""
    torch.manual_seed(0)
    theirs = gpt2(options, CHECKED_TOKENS)
    for parameter in theirs.parameters():  # GPT-2's 0.02 would leave the maps nearly uniform
        parameter += 0.05 * torch.randn_like(parameter)
    ids = torch.randint(options.vocabulary, (1, CHECKED_TOKENS))
    right, wanted = torch.stack(list(maps("transformers", theirs, ids))), answer("transformers", theirs, ids)
    model = BUILD[tool](options, CHECKED_TOKENS)
    if tool == "glassgpt":
        model.load_state_dict(from_gpt2(theirs.state_dict(), n_head=options.heads)[1])
        record = capture(model, ids)
        heads = [record.weights(layer, head) for layer in record.layers for head in range(options.heads)]
        got = torch.stack(heads).view_as(right)
    else:
        from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

        model.load_state_dict(convert_gpt2_weights(theirs, model.cfg), strict=False)
        got = torch.stack(list(maps(tool, model, ids)))
    relative = (answer(tool, model, ids) - wanted).abs() / wanted.abs().clamp_min(1e-3)
    return max(float((got - right).abs().max()), float(relative.max()))


def measure(options: Benchmark, tool: str, n_tokens: int) -> tuple[float, int]:
    """(seconds, bytes beyond the model) of one pass and the statistics of all heads."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    model = BUILD[tool](options, n_tokens)
    answer(tool, model, torch.randint(options.vocabulary, (1, min(16, n_tokens))))  # libraries load
    ids = torch.randint(options.vocabulary, (1, n_tokens))
    before, start = memory_bytes("cpu", "VmRSS"), time.perf_counter()
    answer(tool, model, ids)
    return time.perf_counter() - start, max(1, memory_bytes("cpu", "VmHWM") - before)


def measure_long(options: Benchmark, n_tokens: int) -> dict[str, float]:
    """Of a capture that no tool with maps could hold, and of one block of the saved record."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    model = GPT(ModelConfig(n_layer=6, n_head=6, n_embd=384, vocab_size=1024, block_size=n_tokens)).eval()
    before, start = memory_bytes("cpu", "VmRSS"), time.perf_counter()
    record = capture(model, torch.randint(1024, (n_tokens,)))
    about = {"seconds": time.perf_counter() - start, "megabytes": (memory_bytes("cpu", "VmHWM") - before) / 1e6}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.safetensors"
        record.save(path)
        about["record_megabytes"], saved, times = path.stat().st_size / 1e6, AttentionRecord.load(path), []
        for layer in record.layers:
            start = time.perf_counter()
            saved.block(layer, 0, slice(n_tokens // 2, n_tokens // 2 + 256), slice(n_tokens // 4, n_tokens // 4 + 256))
            times.append(1e3 * (time.perf_counter() - start))
    maps_megabytes = 36 * n_tokens**2 * 4 / 1e6
    return about | {"block_milliseconds": statistics.median(times), "maps_would_be_megabytes": maps_megabytes}


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Benchmark, arguments, "probes.py")
    if min(*options.sizes, options.repeats) < 1 or options.long < 0 or options.width % options.heads:
        raise ValueError("--sizes and --repeats must be at least 1, --long 0 or more, and --heads must divide --width")
    tools = [tool for tool, module in MODULES.items() if importlib.util.find_spec(module) is not None]
    if "transformers" not in tools:
        raise ValueError("the maps of transformers are the oracle: pip install -e '.[test]'")
    for tool in tools:
        if tool != "transformers" and not (error := error_of(options, tool)) <= LIMIT:
            print(f"{tool} is wrong by {error:.1e} (at most {LIMIT:g}): nothing is reported", file=sys.stderr)
            return 1
    rows: list[Sequence[Value]] = []
    for n_tokens in options.sizes:
        turns = [[in_own_process(measure, options, tool, n_tokens) for tool in tools] for _ in range(options.repeats)]
        results = [tuple(map(statistics.median, zip(*of_tool, strict=True))) for of_tool in zip(*turns, strict=True)]
        for tool, (seconds, n_bytes) in zip(tools, results, strict=True):
            ratios = (seconds / results[0][0], n_bytes / results[0][1])
            rows.append((n_tokens, tool, seconds, n_bytes / 1e6, *ratios))
    about: dict[str, Any] = {name: getattr(options, name) for name in ("layers", "heads", "width", "repeats")}
    about |= {"threads": options.threads or torch.get_num_threads()}
    about |= {"not_installed": [tool for tool in MODULES if tool not in tools]}
    if options.long:
        about["long_tokens"] = options.long
        about |= {f"long_{name}": value for name, value in in_own_process(measure_long, options, options.long).items()}
    columns = ("tokens", "tool", "seconds", "megabytes", "times_as_long", "times_the_memory")
    print_table(Table("capture and statistics of all heads", columns, rows, about), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
