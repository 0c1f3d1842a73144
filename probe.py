"""Shows what attention does in a trained model:  python probe.py map runs/quick --text "To be" --layer 0 --head 1"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes import commands
from probes.arguments import check_output, numbers, tokens_of
from training.cli import exit_on_user_error, parse

if TYPE_CHECKING:
    from probes.record import AttentionRecord
    from probes.table import Table
    from training.checkpoint import Run
    from viewer.content import View

    OnRecord = commands.Map | commands.Stats | commands.Compare | commands.Page | commands.Serve


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

    from probes.answers import keep_record

    run = _load(command)
    return keep_record(command, run.model, run.tokenizer, tokens_of(run, text, command.unknown), **_about(run))


def run_map(command: commands.Map) -> int:
    commands.check_map(command)
    record = _open(command)

    from probes.pictures.answer import show_map

    show_map(command, record)
    return 0


def run_page(command: commands.Page) -> int:
    check_output(command.output, (".html",))

    from viewer.page import answer

    return answer(_view(command), command.output, as_json=command.json)


def run_serve(command: commands.Serve) -> int:
    try:
        from viewer.server import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"serve needs {error.name}; install it with: pip install -e '.[serve]'") from error
    return serve(_view(command), command.source, host=command.host, port=command.port, as_json=command.json)


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
    from training.text import validation_tokens

    run = _load(command)
    tokens: list[int] = []
    if command.text or command.file:
        tokens = run.tokenizer.encode(command.read_text(), command.unknown)
    elif not command.repeated:
        tokens = validation_tokens(run.config, run.tokenizer)
    keep = run.checkpoint_path.with_name("ablation.json") if command.is_default else None
    return _print(command, run, ablate(command, run, tokens), keep)


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
    both = sides(command)
    files = {side.source: _open(side) for _, side in both if Path(side.source).is_file()}
    # A run is compared with a record on the record's own text.
    tokens = next((list(record.info.token_ids) for record in files.values()), None)
    opened = [(name, files.get(side.source) or _open(side, tokens)) for name, side in both]
    return _print(command, None, compare(command, opened))


def _print(command: commands.OnModel, run: "Run | None", table: "Table", keep: Path | None = None) -> int:
    """The table, and of which run it is; `keep` is a file that keeps it too."""
    from probes.table import print_table, write_table

    if run is not None:
        about = {"run": str(run.checkpoint_path.parent), "checkpoint": run.checkpoint_path.name, "step": run.step}
        table = dataclasses.replace(table, about=about | dict(table.about))
    print_table(table, as_json=command.json)
    if keep is not None:
        write_table(table, keep)
    return 0


def _tokens(command: commands.OnText, run: "Run") -> list[int]:
    """Of the text that is given, or what takes its place: random tokens to compare, else the run's own text."""
    from training.text import probe_tokens, validation_tokens

    if command.text or command.file or isinstance(command, commands.Map):
        return tokens_of(run, command.read_text(), command.unknown)
    if isinstance(command, commands.Compare):
        from probes.scores import repeated_tokens

        repeated: list[int] = repeated_tokens(run.config.model, 2, run.tokenizer.vocab_size).tolist()
        return repeated
    if isinstance(command, commands.Page | commands.Serve):
        return probe_tokens(run.config, run.tokenizer, lambda: validation_tokens(run.config, run.tokenizer))
    return validation_tokens(run.config, run.tokenizer)[: min(run.config.model.block_size, 1024)]


def _view(command: commands.Page | commands.Serve) -> "View":
    """What is looked at: a record; a run on a text; without a text the records that training kept, where it did."""
    from viewer.content import View, view_of_kept, view_of_model
    from viewer.page import PageSize

    layers = numbers("--layers", command.layers) if isinstance(command, commands.Page) else None
    about: dict[str, Any] = {"title": command.source, "layers": layers}
    if Path(command.source).is_file():
        return View.of(_open(command), **about)
    run = _load(command)
    if not (command.text or command.file) and (view := view_of_kept(run, **about)):
        return view
    tokens = _tokens(command, run)
    if isinstance(command, commands.Page):  # before the model runs on a text of any length
        PageSize.of_model(run.config.model, len(tokens), layers).check()
    return view_of_model(run.model, run.tokenizer, tokens, run=run.checkpoint_path.parent, **about, **_about(run))


def _open(command: "OnRecord", tokens: list[int] | None = None) -> "AttentionRecord":
    """The record that is named, or a new one of the run that is named, of these tokens where no text is given."""
    from probes.record import AttentionRecord

    if Path(command.source).is_file():
        if command.text or command.file:
            raise ValueError(f"{command.source} is a record and has its text; --text and --file need a run directory")
        return AttentionRecord.load(command.source)
    if not Path(command.source).is_dir():
        raise ValueError(f"{command.source} is neither a record nor a run directory")
    run = _load(command)
    layers = numbers("--layer", command.layer) if isinstance(command, commands.Map) else None
    if tokens is None or command.text or command.file:
        tokens = _tokens(command, run)
    return _capture(run, tokens, layers, values=False)


def _load(command: Any) -> "Run":
    from training.checkpoint import load_run
    from training.runtime import choose_device

    return load_run(command.source, command.checkpoint, str(choose_device(command.device)))


def _capture(run: "Run", tokens: list[int], layers: list[int] | None, values: bool) -> "AttentionRecord":
    from probes.capture import capture_text

    return capture_text(run.model, run.tokenizer, tokens, layers=layers, values=values, **_about(run))


def _about(run: "Run") -> dict[str, Any]:
    return {"dtype": run.dtype, "step": run.step, "checkpoint_hash": run.checkpoint_hash}


RUN: dict[type, Any] = {
    commands.Capture: run_capture,
    commands.Map: run_map,
    commands.Page: run_page,
    commands.Serve: run_serve,
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
