"""The configuration tree: frozen dataclasses, TOML files over defaults, flags over files. Imports no torch."""

import dataclasses
import importlib.util
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import tyro

from data.config import DataConfig
from model.config import ModelConfig
from training.cli import parse


@dataclass(frozen=True)
class RunConfig:
    """Where and on what a run happens."""

    dir: str = "runs/default"
    """Run directory: checkpoints, config, metrics and pictures."""
    seed: int = 1337
    """Seeds the parameters, the order of data and dropout."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps; auto takes the first there is of cuda, mps, cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Autocast type; auto takes bfloat16 where the device computes in it. float16 is for CUDA."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto compiles on CUDA only, where it pays for itself."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto continues from a checkpoint if there is one; never moves that run aside; must does not start afresh."""

    def __post_init__(self) -> None:
        if not self.dir.strip():
            raise ValueError("run.dir is empty; name a directory such as runs/first")
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda", "mps") or (index and not (kind == "cuda" and index.isdigit())):
            raise ValueError(f"run.device is {self.device!r}; choose auto, cpu, cuda, cuda:N or mps")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"run.seed is {self.seed}; it must be from 0 to 2^63 - 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """How a gradient becomes an update."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw (Loshchilov & Hutter 2019); muon (Jordan et al. 2024) for matrices of the blocks, adamw for the rest."""
    learning_rate: float = 1e-3
    """Peak of adamw, reached after warm-up."""
    muon_learning_rate: float = 0.02
    """Peak of muon: the length of a step, since its updates have singular values near one."""
    muon_momentum: float = 0.95
    """Decay of the mean of gradients in muon."""
    muon_iterations: int = 5
    """Newton-Schulz iterations that make an update orthogonal."""
    warmup_steps: int = 50
    """Steps of linear rise to the peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the way down from the peak to final_fraction of it at max_steps."""
    decay_fraction: float = 1.0
    """Share of the steps after warm-up that the way down takes; before it the rate stays at its peak."""
    final_fraction: float = 0.0
    """Learning rate at the last step, as a share of the peak."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.99
    """Decay of the mean of squared gradients."""
    weight_decay: float = 0.1
    """Decoupled decay, of matrices only; with muon, of those that it updates."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; 0 is off."""

    def __post_init__(self) -> None:
        _check("optimizer", self, "above 0", lambda x: 0 < x < math.inf, "learning_rate", "muon_learning_rate")
        _check("optimizer", self, "from 1 to 20", lambda x: 1 <= x <= 20, "muon_iterations")
        _check("optimizer", self, "above 0, at most 1", lambda x: 0 < x <= 1, "decay_fraction")
        _check("optimizer", self, "from 0 to 1", lambda x: 0 <= x <= 1, "final_fraction")
        _check("optimizer", self, "0 or more, below 1", lambda x: 0 <= x < 1, "beta1", "beta2", "muon_momentum")
        names = ("warmup_steps", "weight_decay", "grad_clip")
        _check("optimizer", self, "0 or more", lambda x: 0 <= x < math.inf, *names)


@dataclass(frozen=True)
class TrainConfig:
    """How long, in what portions, and what is done at which intervals. A step is one optimizer step."""

    max_steps: int = 1000
    """Steps of the whole run; the schedule ends here."""
    stop_at: int = 0
    """Stop cleanly after this step, with the schedule of max_steps; 0 runs to max_steps."""
    batch_size: int = 32
    """Sequences in a step, over all micro-steps and processes."""
    micro_batch_size: int = 0
    """Sequences that one process computes at once; gradients accumulate. 0: its whole share, on CUDA what fits."""
    log_interval: int = 10
    """Steps between rows of metrics.jsonl."""
    eval_interval: int = 100
    """Steps between validations; the last step is always validated."""
    eval_tokens: int = 0
    """Validate on the first so many tokens of the validation split; 0 takes all of it."""
    checkpoint_interval: int = 100
    """Steps between checkpoints; the last step is always saved."""
    find_lr: int = 0
    """Instead of training, try so many rising learning rates, 5 or more, draw find_lr.png and suggest one; 0 trains."""

    def __post_init__(self) -> None:
        _check("train", self, "at least 1 and below 2^31", lambda x: 1 <= x < 2**31, "batch_size")
        positive = ("max_steps", "log_interval", "eval_interval", "checkpoint_interval")
        _check("train", self, "at least 1", lambda x: x >= 1, *positive)
        _check("train", self, "0 or more", lambda x: x >= 0, "stop_at", "micro_batch_size", "eval_tokens")
        _check("train", self, "0 (to train) or at least 5", lambda x: x == 0 or x >= 5, "find_lr")

    @property
    def last_step(self) -> int:
        """The step after which the loop ends."""
        return min(self.stop_at or self.max_steps, self.max_steps)


@dataclass(frozen=True)
class LogConfig:
    """What is shown and kept of a run, besides metrics.jsonl, which is always written."""

    progress: bool = True
    """Show a progress bar."""
    sample_tokens: int = 200
    """Length of the sample printed at the end; 0 prints none."""
    sample_prompt: str = "\n"
    """What the sample continues."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: offline writes below the run directory, online sends (needs the extra `wandb`)."""
    wandb_project: str = "glassgpt"
    """Project that wandb files the run under."""

    def __post_init__(self) -> None:
        _check("log", self, "0 or more", lambda x: x >= 0, "sample_tokens")


@dataclass(frozen=True)
class ProbeConfig:
    """What is looked at during training and when it ends."""

    text: str = ""
    """Text that attention.png and page.html show; empty takes the start of the validation split."""
    max_tokens: int = 128
    """They show at most so many tokens of it; 0 makes neither."""
    interval: int = 0
    """Steps between looks at the heads: scores in probes.jsonl, a record of attention in records/; 0 is never."""

    def __post_init__(self) -> None:
        _check("probe", self, "0 or more", lambda x: x >= 0, "max_tokens", "interval")


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        if not self.model.causal:
            raise ValueError(
                "model.causal is False: every position would see the token that it has to predict. "
                "Train with True; use a bidirectional GPT from Python"
            )
        if self.probe.interval and self.model.block_size < 8:
            raise ValueError(f"probe.interval needs a model.block_size of at least 8, not {self.model.block_size}")

    def micro_batch_size(self, world_size: int) -> int:
        """Sequences that one process computes at once. ValueError, with the arithmetic, when they do not come out."""
        batch_size = self.train.batch_size
        if batch_size % world_size:
            raise ValueError(
                f"train.batch_size {batch_size} / {world_size} processes = {batch_size / world_size:g}: not whole; "
                f"try {batch_size - batch_size % world_size or world_size}"
            )
        share = batch_size // world_size
        micro = self.train.micro_batch_size or share
        if share % micro:
            divisors = [n for n in range(1, min(share, 10_000) + 1) if share % n == 0]
            raise ValueError(
                f"train.batch_size {batch_size} / {world_size} process(es) / train.micro_batch_size {micro} = "
                f"{share / micro:g} micro-steps: not whole; micro_batch_size could be {', '.join(map(str, divisors))}"
            )
        return micro

    def with_vocabulary(self, n_tokens: int) -> "Config":
        """The configuration with the model's vocabulary filled in from the tokenizer's n_tokens."""
        vocab_size = self.model.vocab_size or n_tokens
        if vocab_size < n_tokens:
            raise ValueError(
                f"model.vocab_size {vocab_size} is less than the tokenizer's {n_tokens}; 0 takes the tokenizer's"
            )
        return dataclasses.replace(self, model=dataclasses.replace(self.model, vocab_size=vocab_size))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dict, as TOML files and checkpoints hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, dict[str, Any]]) -> "Config":
        """Inverse of to_dict. ValueError for a section, key or value that this version does not know."""
        try:
            sections = get_type_hints(cls)
            if unknown := set(values) - set(sections):
                raise KeyError(*sorted(unknown))
            for name, section in sections.items():  # a file that is not ours may hold anything
                if not isinstance(values[name], dict):
                    raise TypeError(f"{name} is {values[name]!r}")
                for key, value in values[name].items():
                    kind = type(getattr(section, key, value))
                    if type(value) not in ((int, float) if kind is float else (kind,)):
                        raise TypeError(f"{name}.{key} is {value!r}")
            return cls(**{name: section(**values[name]) for name, section in sections.items()})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this configuration is not one of this version of glassgpt: {error}") from error

    def to_toml(self) -> str:
        """The text of a configuration file that gives this configuration."""
        sections = [
            f"[{section}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())
            for section, values in self.to_dict().items()
        ]
        return "\n".join(sections)


def parse_arguments(argv: Sequence[str], prog: str) -> Config:
    """`FILE.toml … --section.key value …` -> Config: later files win over earlier ones, flags over files.

    ValueError for unknown keys and flags, with the nearest names, and for values out of range. --help shows the files'
    values as defaults and exits.
    """
    n_files = next((i for i, argument in enumerate(argv) if argument.startswith("-")), len(argv))
    config = Config()
    for file in argv[:n_files]:
        try:
            config = _parse(_as_flags(Path(file)), config, prog=prog)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    config = _parse(argv[n_files:], config, prog=prog)
    # Not in LogConfig: a run made with wandb can be sampled on a machine without.
    if config.log.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise ValueError(f"log.wandb {config.log.wandb} needs wandb: pip install -e '.[wandb]'")
    return config


def _parse(arguments: Sequence[str], default: Config, prog: str) -> Config:
    return parse(
        # Booleans are written out (--model.bias True), so that files and flags say the same.
        tyro.conf.FlagConversionOff[Config],
        arguments,
        prog,
        default=default,
        use_underscores=True,
        description="Trains a GPT. Before the flags name any number of TOML files, such as configs/quick.toml.",
    )


def _as_flags(file: Path) -> list[str]:
    """The settings of a TOML file as command-line flags, so that both are checked by one parser."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(str(path) for path in Path("configs").glob("*.toml"))) or "none"
        raise ValueError(f"cannot be read ({error.strerror}); configurations here: {known}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no valid TOML: {error}") from error
    flags: list[str] = []
    for section, values in table.items():
        if not isinstance(values, dict):
            raise ValueError(f"{section} = … stands outside a section; sections are [run], [model], …")
        for key, value in values.items():
            if "=" in f"{section}{key}" or isinstance(value, dict | list):
                raise ValueError(f"{section}.{key} = {value}: a setting is one name with one number, word or text")
            flags.append(f"--{section}.{key}={value}")  # with =, or a text like "--" would pass for a flag
    return flags


def _toml(value: Any) -> str:
    """JSON's text of a value is TOML too, once no character is escaped as two surrogates and DEL is escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check(section: str, config: Any, need: str, is_valid: Callable[[Any], bool], *names: str) -> None:
    """ValueError for the first of these settings that is not what is needed."""
    for name in names:
        if not is_valid(value := getattr(config, name)):
            raise ValueError(f"{section}.{name} is {value}; it must be {need}")
