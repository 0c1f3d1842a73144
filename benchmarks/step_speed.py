"""Speed of a training step of nanoGPT's "baby GPT":  python benchmarks/step_speed.py

Ours as train.py runs it, and nanoGPT's model and optimizer on its CPU default, float32, each in a process of its own.
First both get the same weights and tokens; when their losses differ, nothing is reported.
"""

import io
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # a script finds its own folder there, not the repository
from benchmarks.process import in_own_process  # noqa: E402
from model import GPT, ModelConfig  # noqa: E402
from model.gpt import next_token_loss  # noqa: E402
from probes.table import Table, print_table  # noqa: E402
from training.cli import exit_on_user_error, parse  # noqa: E402
from training.config import Config, LogConfig, RunConfig, TrainConfig  # noqa: E402
from training.metrics import MetricsLog, peak_flops  # noqa: E402
from training.optimizer import build_optimizer  # noqa: E402
from training.runtime import Runtime, choose_dtype, keep_freed_memory  # noqa: E402

LIMIT = 1e-4  # of the difference of both losses, in float32


@dataclass(frozen=True)
class Benchmark:
    """Tokens a second of a training step, of our GPT and of nanoGPT's, and the cost of logging."""

    layers: int = 6
    """Layers; the default is nanoGPT's baby GPT of 10.65 M parameters."""
    heads: int = 6
    """Heads of a layer."""
    width: int = 384
    """n_embd."""
    block: int = 256
    """block_size."""
    batch: int = 64
    """Sequences a step."""
    attention: str = "dense"
    """Attention path of ours."""
    micro_batch: int = 0
    """Sequences that ours computes at once; 0: all of them."""
    steps: int = 4
    """Measured steps of each, after one; the median counts."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def model(self) -> ModelConfig:
        return ModelConfig(
            n_layer=self.layers,
            n_head=self.heads,
            n_embd=self.width,
            block_size=self.block,
            vocab_size=65,
            attention=self.attention,
            mlp="gelu_exact",
        )


class NanoBlock(nn.Module):
    """nanoGPT's block: one matrix for q, k and v; PyTorch's attention; exact GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.c_fc, self.mlp_proj = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x)).split(x.shape[-1], dim=2)
        q, k, v = (part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(x.shape))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """Learned positions, tied head. Built from the weights of our GPT, so that both compute the same."""

    def __init__(self, ours: GPT) -> None:
        super().__init__()
        config = ours.config
        self.wte, self.wpe = (nn.Embedding(n, config.n_embd) for n in (config.vocab_size, config.block_size))
        self.h = nn.ModuleList(NanoBlock(config.n_embd, config.n_head) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=False)
        theirs = {"wte": "token_embedding", "wpe": "position_embedding", "ln_f": "final_norm"}
        names = {"ln_1": "attn_norm", "ln_2": "mlp_norm", "c_proj": "attn.o_proj"}
        names |= {"c_fc": "mlp.up_proj", "mlp_proj": "mlp.down_proj"}
        theirs |= {f"h.{i}.{a}": f"blocks.{i}.{b}" for i in range(config.n_layer) for a, b in names.items()}
        state = ours.state_dict()
        weights = {f"{a}.weight": state[f"{b}.weight"] for a, b in theirs.items()}
        for i in range(config.n_layer):
            parts = [state[f"blocks.{i}.attn.{part}_proj.weight"] for part in "qkv"]
            weights[f"h.{i}.c_attn.weight"] = torch.cat(parts)
        self.load_state_dict(weights)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def draw(options: Benchmark) -> tuple[GPT, Tensor, Tensor]:
    torch.manual_seed(0)
    model = GPT(options.model())
    tokens = torch.randint(65, (options.batch, options.block + 1))
    return model, tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """Weights under which every part of a model shows in its output: fresh ones leave the residual stream as it was."""
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


@torch.no_grad()
def difference(options: Benchmark) -> float:
    """Of the losses of both models with the same weights, in float32."""
    model, x, y = draw(replace(options, batch=2))
    spread(model)
    return abs((next_token_loss(model(x), y) - next_token_loss(NanoGPT(model)(x), y)).item())


def measure(options: Benchmark, who: str) -> dict[str, float]:
    """Seconds of a step, and for ours the rate of a matrix product in the same process and number type."""
    model, x, y = draw(options)
    if who == "nanoGPT":
        nano = NanoGPT(model)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in nano.parameters() if (p.dim() >= 2) is is_matrix], "weight_decay": decay}
            for is_matrix, decay in ((True, 0.1), (False, 0.0))
        ]
        adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))

        def nano_step() -> None:
            next_token_loss(nano(x), y).backward()
            torch.nn.utils.clip_grad_norm_(nano.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad(set_to_none=True)

        return {"seconds": time_of(nano_step, options.steps)}
    keep_freed_memory()
    cpu = torch.device("cpu")
    runtime = Runtime(cpu, choose_dtype("auto", cpu))
    optimizer = build_optimizer(model, Config().optimizer)
    parts = list(zip(*(part.split(options.micro_batch or options.batch) for part in (x, y)), strict=True))

    def step() -> None:
        for inputs, targets in parts:
            with runtime.autocast():
                logits = model(inputs)
            (next_token_loss(logits, targets) / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = time_of(step, options.steps)
    return {"seconds": seconds, "peak": peak_flops(runtime)[0]}


def time_of(step: Callable[[], None], n_steps: int) -> float:
    """Median seconds; the first step is not counted."""
    times = []
    for _ in range(n_steps + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def logging_seconds(folder: Path) -> float:
    """Seconds a step that metrics.jsonl and the progress bar take at their defaults."""
    from tqdm import tqdm

    config, n_steps = Config(run=RunConfig(dir=str(folder)), train=TrainConfig(), log=LogConfig()), 2000
    row = dict.fromkeys(("tokens", "seconds", "train_loss", "learning_rate", "grad_norm", "tokens_per_second"), 1.2345)
    with MetricsLog(folder, config, resumed_step=0) as log, tqdm(total=n_steps, file=io.StringIO()) as bar:
        start = time.perf_counter()
        for step in range(1, n_steps + 1):
            bar.update()
            if step % config.train.log_interval == 0:
                bar.set_postfix_str(f"loss {1.2345:.3f}, {1.2345:,.0f} tokens/s")
                log.write({"step": step} | row)
        return (time.perf_counter() - start) / n_steps


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    import tempfile

    options = parse(Benchmark, arguments, "step_speed.py")
    if min(options.batch, options.steps) < 1 or options.micro_batch < 0:
        raise ValueError("--batch and --steps must be at least 1, --micro-batch 0 (all of a batch) or more")
    if options.micro_batch and options.batch % options.micro_batch:
        raise ValueError(f"--micro-batch {options.micro_batch} does not divide --batch {options.batch}")
    if not (error := difference(options)) <= LIMIT:
        print(f"the losses differ by {error:.1e} (at most {LIMIT:g}): nothing is reported", file=sys.stderr)
        return 1
    theirs = in_own_process(measure, options, "nanoGPT")
    ours = in_own_process(measure, options, "glassgpt")
    n_parameters, n_tokens = GPT(options.model()).n_parameters(), options.batch * options.block
    rows = []
    for name, result in (("nanoGPT, float32", theirs), ("glassgpt", ours)):
        speed = n_tokens / result["seconds"]
        rows.append(
            (name, result["seconds"], speed, 6 * n_parameters * speed / 1e9, theirs["seconds"] / result["seconds"])
        )
    with tempfile.TemporaryDirectory() as folder:
        logging = logging_seconds(Path(folder))
    about = {
        "parameters": n_parameters,
        "matrix_product_gflops": ours["peak"] / 1e9,
        "share_of_it": 6 * n_parameters * n_tokens / ours["seconds"] / ours["peak"],
        "logging_microseconds_a_step": 1e6 * logging,
        "logging_share_of_31_ms": logging / 0.031,
    }
    columns = ("who", "step_seconds", "tokens_per_second", "gflops", "times_as_fast")
    print_table(Table("a training step of the baby GPT", columns, rows, about), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
