"""Continues a text with a trained model:  python sample.py runs/quick --prompt "The " """

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from model.config import SamplingConfig
from training.cli import exit_on_user_error, parse, printable


@dataclass(frozen=True)
class Arguments:
    """Continues a text with a trained model."""

    run: tyro.conf.Positional[str]
    """Run directory."""
    prompt: str = ""
    """Text to continue."""
    prompt_file: str = ""
    """File whose text is continued."""
    max_new_tokens: int = 200
    """Length of a sample."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the likeliest one's probability."""
    n_samples: int = 1
    """Samples, made in one batch."""
    seed: int = 1337
    """Same seed, same samples."""
    stop: str = ""
    """End a sample before this text."""
    cache: bool = True
    """Remember keys and values instead of recomputing them for each token; the text is the same."""
    json: bool = False
    """Print one JSON object instead of text."""
    unknown: Literal["error", "skip"] = "error"
    """What to do with characters of the prompt that the model has never seen."""
    checkpoint: Literal["best", "last"] = "best"
    """The parameters of the lowest validation loss, or the newest."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Of matrix products. auto: as train.py chooses. bfloat16 rounds, and on CPU is up to 1.6 times as quick."""

    def __post_init__(self) -> None:
        if self.prompt and self.prompt_file:
            raise ValueError("give --prompt or --prompt-file, not both")
        if self.max_new_tokens < 1:
            raise ValueError(f"max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        if not 1 <= self.n_samples <= 100_000:
            raise ValueError(f"n-samples is {self.n_samples}; it must be from 1 to 100000")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")
        self.sampling()

    def sampling(self) -> SamplingConfig:
        return SamplingConfig(self.temperature, self.top_k, self.top_p, self.min_p)


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(Arguments, argv, "sample.py")
    prompt = read_prompt(arguments)

    from training.checkpoint import load_run
    from training.runtime import Runtime, choose_device, choose_dtype
    from training.text import TextStream, generate_text, start_tokens

    device = choose_device(arguments.device)
    runtime = Runtime(device, choose_dtype(arguments.dtype, device))
    run = load_run(arguments.run, arguments.checkpoint, str(device))
    prompt_tokens = run.tokenizer.encode(prompt, unknown=arguments.unknown) or start_tokens(run.tokenizer)
    steps = generate_text(
        run.model,
        run.tokenizer,
        prompt_tokens,
        n_samples=arguments.n_samples,
        max_new_tokens=arguments.max_new_tokens,
        sampling=arguments.sampling(),
        seed=arguments.seed,
        stop=arguments.stop,
        use_cache=arguments.cache,
    )
    is_streamed = arguments.n_samples == 1 and not arguments.json
    shown = printable if sys.stdout.isatty() else str  # a file or a program gets the very text
    if is_streamed:
        print(shown(prompt), end="", flush=True)
    streams: list[TextStream] = []
    with runtime.autocast():
        for streams, released in steps:  # noqa: B007
            if is_streamed:
                print(shown(released[0]), end="", flush=True)
    if arguments.json:
        samples = [{"text": s.text, "tokens": s.tokens, "finish": s.finish} for s in streams]
        about = {"run": arguments.run, "checkpoint": run.checkpoint_path.name, "step": run.step}
        print(json.dumps(about | {"prompt": prompt, "prompt_tokens": prompt_tokens, "samples": samples}))
    elif is_streamed:
        print()
    else:
        for i, stream in enumerate(streams, start=1):
            print(f"--- {i} of {len(streams)}\n{shown(prompt + stream.text)}")
    return 0


def read_prompt(arguments: Arguments) -> str:
    if not arguments.prompt_file:
        return arguments.prompt
    try:
        return Path(arguments.prompt_file).read_text(encoding="utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise ValueError(f"cannot read --prompt-file {arguments.prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {arguments.prompt_file} is not UTF-8 at byte {error.start}") from error


if __name__ == "__main__":
    sys.exit(main())
