"""Shows what attention does in a trained model:  python probe.py map runs/quick --text "To be" --layer 0 --head 1"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes import commands
from probes.commands import check_output, numbers, tokens_of
from training.cli import exit_on_user_error, parse

if TYPE_CHECKING:
    from probes.record import AttentionRecord
    from probes.table import Table
    from training.checkpoint import Run


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    command: Any = parse(commands.Command, argv, "probe.py", description=__doc__)
    if not command.source:
        raise ValueError(f"which run? for example: probe.py {type(command).__name__.lower()} runs/quick")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return RUN[type(command)](command)


def run_capture(command: commands.Capture) -> int:
    check_output(command.output, (".safetensors",))
    text = command.read_text()

    from probes.capture import check_room, estimate_seconds, readable

    run = _load(command)
    layers = numbers("--layers", command.layers)
    tokens = tokens_of(run, text, command.unknown)
    n_layers, folder = len(set(layers)) if layers else None, Path(command.output).parent
    kept: dict[str, Any] = {"n_layers": n_layers, "values": command.values, "dtype": run.dtype}
    size = check_room(run.config.model, len(tokens), folder, **kept)
    if not command.json:
        seconds = estimate_seconds(run.model, tokens)
        print(f"{len(tokens)} tokens: a record of about {readable(size)}, in about {seconds:.1g} s", flush=True)
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


def run_map(command: commands.Map) -> int:
    if command.output:
        check_output(command.output, (".png", ".svg", ".csv"))
    is_one_head = command.layer.isdecimal() and command.head.isdecimal()
    is_csv = command.output.lower().endswith(".csv")
    if (is_csv or command.json) and not is_one_head:
        raise ValueError("a table holds one head; give --layer and --head")
    record = _open(command)
    layers = numbers("--layer", command.layer) or record.layers
    heads = numbers("--head", command.head) or range(record.n_head)
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


def run_check(command: commands.Check) -> int:
    import torch
    from rich.console import Console

    from probes.checks.check import check
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


def run_ablate(command: commands.Ablate) -> int:
    from probes.causal.answers import ablate

    run = _load(command)
    tokens: list[int] = []
    if command.text or command.file:
        tokens = run.tokenizer.encode(command.read_text(), command.unknown)
    elif not command.repeated:
        tokens = _validation_tokens(run)
    return _print(command, run, ablate(command, run, tokens))


def run_causal(command: commands.Knockout | commands.Patch | commands.Lens) -> int:
    from probes.causal.answers import knock_out, look, patch

    run = _load(command)
    if isinstance(command, commands.Knockout):
        return _print(command, run, knock_out(command, run))
    return _print(command, run, patch(command, run) if isinstance(command, commands.Patch) else look(command, run))


def run_heads(command: commands.Heads) -> int:
    from probes.answers import heads

    run, record, name = _load(command), None, "random tokens"
    try:
        record = _capture(run, _tokens(command, run), None, values=False)
        name = command.file or ("--text" if command.text else "validation")
    except ValueError:
        if command.text or command.file:
            raise
    return _print(command, run, heads(command, run.model, run.tokenizer, record, name))


def run_rollout(command: commands.Rollout) -> int:
    from probes.answers import roll_out

    run = _load(command)
    record = _capture(run, _tokens(command, run), None, values=True)
    return _print(command, run, roll_out(command, run.model, record))


def run_records(command: commands.Stats | commands.Compare | commands.Timeline) -> int:
    from probes.answers import compare, sides, stats, timeline
    from training.metrics import read_metrics

    if isinstance(command, commands.Timeline):
        return _print(command, None, timeline(command, read_metrics(Path(command.source), "probes.jsonl")))
    if isinstance(command, commands.Stats):
        return _print(command, None, stats(command, _open(command)))
    return _print(command, None, compare(command, [(name, _open(side)) for name, side in sides(command)]))


def _print(command: commands.OnModel, run: "Run | None", table: "Table") -> int:
    """The table, and of which run it is."""
    from probes.table import print_table

    about: dict[str, Any] = {}
    if run is not None:
        about = {"run": str(run.checkpoint_path.parent), "checkpoint": run.checkpoint_path.name, "step": run.step}
    print_table(dataclasses.replace(table, about=about | dict(table.about)), as_json=command.json)
    return 0


def _validation_tokens(run: "Run") -> list[int]:
    """The validation part of the text that the run was trained on. ValueError when it is not there any more."""
    from data.prepare import prepare

    try:
        corpus = prepare(run.config.data, show_progress=False)
        if corpus.tokenizer.hash != run.tokenizer.hash:
            raise ValueError("its text has another vocabulary now")
        tokens: list[int] = corpus.split(run.config.data.val_fraction, run.config.model.block_size).val.tolist()
    except ValueError as error:
        raise ValueError(f"the run's own data cannot be used ({error}); give --text or --file") from error
    return tokens


def _tokens(command: commands.OnText, run: "Run") -> list[int]:
    """Of the text that is given, or what takes its place: random tokens to compare, else validation text."""
    if command.text or command.file or isinstance(command, commands.Map):
        return tokens_of(run, command.read_text(), command.unknown)
    if isinstance(command, commands.Compare):
        from probes.scores import repeated_tokens

        repeated: list[int] = repeated_tokens(run.config.model, 2, run.tokenizer.vocab_size).tolist()
        return repeated
    return _validation_tokens(run)[: min(run.config.model.block_size, 1024)]


def _open(command: commands.Map | commands.Stats | commands.Compare) -> "AttentionRecord":
    """The record that is named, or a new one of the run that is named."""
    from probes.record import AttentionRecord

    if Path(command.source).is_file():
        if command.text or command.file:
            raise ValueError(f"{command.source} is a record and has its text; --text and --file need a run directory")
        return AttentionRecord.load(command.source)
    if not Path(command.source).is_dir():
        raise ValueError(f"{command.source} is neither a record nor a run directory")
    run = _load(command)
    layers = numbers("--layer", command.layer) if isinstance(command, commands.Map) else None
    return _capture(run, _tokens(command, run), layers, values=False)


def _load(command: Any) -> "Run":
    from training.checkpoint import load_run
    from training.runtime import choose_device

    return load_run(command.source, command.checkpoint, str(choose_device(command.device)))


def _capture(run: "Run", tokens: list[int], layers: list[int] | None, values: bool) -> "AttentionRecord":
    from probes.capture import capture

    about: dict[str, Any] = {"dtype": run.dtype, "step": run.step, "checkpoint_hash": run.checkpoint_hash}
    about["token_bytes"] = [run.tokenizer.token_bytes(token) for token in tokens]
    return capture(run.model, tokens, layers=layers, values=values, **about)


RUN: dict[type, Any] = {
    commands.Capture: run_capture,
    commands.Map: run_map,
    commands.Check: run_check,
    commands.Ablate: run_ablate,
    commands.Knockout: run_causal,
    commands.Patch: run_causal,
    commands.Lens: run_causal,
    commands.Heads: run_heads,
    commands.Stats: run_records,
    commands.Rollout: run_rollout,
    commands.Compare: run_records,
    commands.Timeline: run_records,
}


if __name__ == "__main__":
    sys.exit(main())
