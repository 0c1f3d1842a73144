"""Shows what attention does in a trained model:  python probe.py map runs/quick --text "To be" --layer 0 --head 1"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from probes.commands import Capture, Check, Command, Map, OnText
from training.cli import exit_on_user_error, parse

if TYPE_CHECKING:
    from probes.record import AttentionRecord
    from training.checkpoint import Run


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    command: Capture | Map | Check = parse(Command, argv, "probe.py", description=__doc__)
    if not command.source:
        raise ValueError(f"which run? for example: probe.py {type(command).__name__.lower()} runs/quick")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if isinstance(command, Capture):
        return run_capture(command)
    return run_map(command) if isinstance(command, Map) else run_check(command)


def run_capture(command: Capture) -> int:
    _check_output(command.output, (".safetensors",))
    text = _read_text(command)

    from probes.capture import check_room, readable

    run = _load(command)
    layers = _numbers("--layers", command.layers)
    tokens = _tokens(run, text, command.unknown)
    n_layers, folder = len(set(layers)) if layers else None, Path(command.output).parent
    kept: dict[str, Any] = {"n_layers": n_layers, "values": command.values, "dtype": run.dtype}
    size = check_room(run.config.model, len(tokens), folder, **kept)
    if not command.json:
        print(f"{len(tokens)} tokens: a record of about {readable(size)}", flush=True)
    record = _capture(run, tokens, layers, command.values)
    record.save(command.output)
    n_bytes = Path(command.output).stat().st_size
    if command.json:
        about = {"record": command.output, "estimated_bytes": size, "bytes": n_bytes, "tokens": len(tokens)}
        first = record.info.layers[0]
        made = {"layers": record.layers, "path": first.path, "kernel": first.kernel, "dtype": record.info.dtype}
        print(json.dumps(about | made | {"step": run.step}))
    else:
        print(f"wrote {command.output}, {readable(n_bytes)}; its row sums and outputs agree with the kernel's")
    return 0


def run_map(command: Map) -> int:
    if command.output:
        _check_output(command.output, (".png", ".svg", ".csv"))
    is_one_head = command.layer.isdecimal() and command.head.isdecimal()
    is_csv = command.output.lower().endswith(".csv")
    if (is_csv or command.json) and not is_one_head:
        raise ValueError("a table holds one head; give --layer and --head")
    record = _open(command)
    layers = _numbers("--layer", command.layer) or record.layers
    heads = _numbers("--head", command.head) or range(record.n_head)
    record.check(layers, heads)
    layer, head = layers[0], heads[0]

    from rich.console import Console

    from probes.pictures.draw import draw_head, draw_heads, write_csv
    from probes.pictures.terminal import print_head, print_heads

    if command.output and not is_one_head:
        draw_heads(record, command.output, layers=layers, heads=heads)
    elif command.output:
        (write_csv if is_csv else draw_head)(record, layer, head, command.output)
    elif command.json:
        weights = record.weights(layer, head).tolist()
        print(json.dumps({"layer": layer, "head": head, "tokens": record.info.token_texts, "weights": weights}))
    elif is_one_head:
        print_head(record, layer, head, Console())
    else:
        print_heads(record, layers, heads, Console())
    if command.output:
        print(json.dumps({"output": command.output}) if command.json else f"wrote {command.output}")
    return 0


def run_check(command: Check) -> int:
    import torch
    from rich.console import Console

    from probes.check import check
    from probes.pictures.terminal import print_checks

    run = _load(command)
    n_valid, n_tokens = run.tokenizer.vocab_size, min(run.config.model.block_size, 256)
    tokens = torch.randint(n_valid, (n_tokens,), generator=torch.Generator().manual_seed(0))
    results = check(run.model, tokens, n_valid_tokens=n_valid)
    if command.json:
        about = {"run": command.source, "checkpoint": run.checkpoint_path.name, "step": run.step, "tokens": n_tokens}
        print(json.dumps(about | {"checks": [dataclasses.asdict(result) for result in results]}))
    else:
        made = f"path {run.config.model.attention}, {n_tokens} random tokens"
        print_checks(results, f"{run.checkpoint_path}, step {run.step}: {made}", Console())
    return 0 if all(result.passed for result in results) else 1


def _open(command: Map) -> "AttentionRecord":
    """The record that is named, or a new one of the run that is named."""
    from probes.record import AttentionRecord

    if Path(command.source).is_file():
        if command.text or command.file:
            raise ValueError(f"{command.source} is a record and has its text; --text and --file need a run directory")
        return AttentionRecord.load(command.source)
    if not Path(command.source).is_dir():
        raise ValueError(f"{command.source} is neither a record nor a run directory")
    text, run = _read_text(command), _load(command)
    return _capture(run, _tokens(run, text, command.unknown), _numbers("--layer", command.layer), values=False)


def _load(command: Capture | Map | Check) -> "Run":
    from training.checkpoint import load_run
    from training.runtime import choose_device

    return load_run(command.source, command.checkpoint, str(choose_device(command.device)))


def _capture(run: "Run", tokens: list[int], layers: list[int] | None, values: bool) -> "AttentionRecord":
    from probes.capture import capture

    about: dict[str, Any] = {"dtype": run.dtype, "step": run.step, "checkpoint_hash": run.checkpoint_hash}
    about["token_bytes"] = [run.tokenizer.token_bytes(token) for token in tokens]
    return capture(run.model, tokens, layers=layers, values=values, **about)


def _tokens(run: "Run", text: str, unknown: Literal["error", "skip"]) -> list[int]:
    tokens = run.tokenizer.encode(text, unknown=unknown)
    if not tokens:
        raise ValueError("no token is left of the text; at least one is needed")
    limit = run.config.model.block_size
    if len(tokens) > limit:
        raise ValueError(f"the text has {len(tokens)} tokens; this model reads at most {limit} (model.block_size)")
    return tokens


def _read_text(command: OnText) -> str:
    text = command.text
    try:
        if command.file:
            text = Path(command.file).read_text(encoding="utf-8-sig")
        text.encode("utf-8")  # what the shell passes may hold stray bytes
    except OSError as error:
        raise ValueError(f"cannot read --file {command.file}: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError(f"{command.file or '--text'} is not UTF-8 at {getattr(error, 'start', 0)}") from error
    if not text:
        raise ValueError("the text is empty; give --text or --file with at least one token")
    return text


def _check_output(output: str, suffixes: tuple[str, ...]) -> None:
    path = Path(output)
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"give -o a file name that ends in {' or '.join(suffixes)}, not {output!r}")
    if not path.parent.is_dir():
        raise ValueError(f"-o {output}: there is no folder {path.parent}")


def _numbers(flag: str, text: str) -> list[int] | None:
    """`0,2` -> [0, 2]; None for all."""
    if text != "all" and not all(part.isdecimal() for part in text.split(",")):
        raise ValueError(f"{flag} {text} is no number from 0; give one, several such as 0,1, or all")
    return None if text == "all" else [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
