"""What `probe.py heads`, `stats`, `rollout`, `compare` and `timeline` answer, as tables, and what `capture` says."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from model import GPT
from probes.arguments import check_output, numbers
from probes.capture import Tokenizer, capture_text, check_room, estimate_seconds, readable
from probes.commands import Capture, Compare, Heads, Rollout, Stats, Timeline
from probes.pictures.labels import labels
from probes.record import AttentionRecord
from probes.scores import SCORES, Scores, roles, score_heads, score_record
from probes.statistics import map_difference, rollout
from probes.table import Table, Value
from probes.timeline import Row, draw_timeline, timeline_table

STATISTICS = ("entropy", "entropy_share", "distance", "sink", "confidence", "positional", "offset", "received")


def keep_record(command: Capture, model: GPT, tokenizer: Tokenizer, tokens: list[int], **about: Any) -> int:
    """Says how large the record will be and how long it takes, makes it, and writes it. about: of the run."""
    layers, folder = numbers("--layers", command.layers), Path(command.output).parent
    kept: dict[str, Any] = {"n_layers": len(set(layers)) if layers else None, "values": command.values}
    size = check_room(model.config, len(tokens), folder, dtype=about["dtype"], **kept)
    if not command.json:
        seconds = estimate_seconds(model, tokens)
        print(f"{len(tokens)} tokens: a record of about {readable(size)}, in about {seconds:.1g} s", flush=True)
    record = capture_text(model, tokenizer, tokens, layers=layers, values=command.values, **about)
    record.save(command.output)
    n_bytes = Path(command.output).stat().st_size
    if not command.json:
        print(f"wrote {command.output}, {readable(n_bytes)}; its row sums and outputs agree with the kernel's")
        return 0
    first, sizes = record.info.layers[0], {"estimated_bytes": size, "bytes": n_bytes, "tokens": len(tokens)}
    made = {"layers": record.layers, "path": first.path, "kernel": first.kernel, "dtype": record.info.dtype}
    print(json.dumps({"record": command.output} | sizes | made | {"step": record.info.step}))
    return 0


def heads(command: Heads, model: GPT, tokenizer: Tokenizer, text: AttentionRecord | None, text_name: str) -> Table:
    """All scores of all heads, and the roles that they earn."""
    about: dict[str, Any] = {"n_valid_tokens": tokenizer.vocab_size, "token_bytes": tokenizer.token_bytes}
    scores, random = score_heads(model, text=text, n_draws=command.draws, **about)
    columns = ("head", "roles", *SCORES)
    rows = [(str(name), roles(head), *_values(head, SCORES)) for name, head in scores.items()]
    tokens = {"random_tokens": random.n_tokens, "text": text_name, "text_tokens": text.n_tokens if text else None}
    return _sorted(Table("heads: layer.head, and what each does", columns, rows, tokens), command.sort)


def stats(command: Stats, record: AttentionRecord) -> Table:
    """Where each head looks, from one walk over its map."""
    scores = score_record(record, only={"statistics", "received"})
    columns = ("head", "path", "kernel", *STATISTICS)
    rows: list[Sequence[Value]] = []
    for name, head in scores.items():
        layer = record.layer_info(name.layer)
        rows.append((str(name), layer.path, layer.kernel, *_values(head, STATISTICS)))
    about = {"tokens": record.n_tokens, "step": record.info.step}
    return _sorted(Table("statistics of attention, means over rows", columns, rows, about), command.sort)


def roll_out(command: Rollout, model: GPT, record: AttentionRecord) -> Table:
    """The tokens that reach each chosen row most."""
    chosen = [record.n_tokens - 1] if command.rows == "last" else numbers("--rows", command.rows)
    rows = list(range(record.n_tokens)) if chosen is None else chosen
    flow = rollout(record, rows, model=model if command.norms else None)
    names = labels(record.info.token_bytes, record.info.token_ids)
    n_shown = min(command.top, record.n_tokens) if command.top > 0 else record.n_tokens
    lines: list[Sequence[Value]] = []
    for i, shares in zip(rows, flow, strict=True):
        heaviest, places = shares[: i + 1].topk(min(n_shown, i + 1)) if record.is_causal else shares.topk(n_shown)
        lines += [
            (i, names[i], j, names[j], share) for j, share in zip(places.tolist(), heaviest.tolist(), strict=True)
        ]
    method = "norm-weighted (Kobayashi et al. 2020)" if command.norms else "Abnar & Zuidema 2020"
    about = {"tokens": record.n_tokens, "method": method}
    return Table("attention rollout", ("row", "row_token", "position", "token", "share"), lines, about)


def sides(command: Compare) -> list[tuple[str, Compare]]:
    """The two that are compared: a name, and the command whose source and checkpoint it is."""
    if command.steps:
        first, second = step_records(command.source, command.steps)
        return [(source, replace(command, source=source)) for source in (first, second)]
    if command.other:
        return [(source, replace(command, source=source)) for source in (command.source, command.other)]
    if Path(command.source).is_file():
        raise ValueError(f"{command.source} is one record; name a second one to compare it with")
    checkpoints: tuple[Literal["best", "last"], ...] = ("best", "last")
    return [(f"{command.source} {which}", replace(command, checkpoint=which)) for which in checkpoints]


def compare(command: Compare, records: Sequence[tuple[str, AttentionRecord]]) -> Table:
    """Of every head that both have, second minus first: its scores, and the share of attention that moved."""
    (first_name, first), (second_name, second) = records
    if first.info.token_ids != second.info.token_ids:
        raise ValueError(
            f"{first_name} and {second_name} are of different tokens; give --text and runs of one vocabulary, "
            "or two records of one text"
        )
    before, after = score_record(first), score_record(second)
    names = [name for name in before if name in after]
    keys = [key for key in SCORES if key != "offset" and names and key in before[names[0]]]
    rows = [
        (str(name), map_difference(first, second, *name), *_values(_difference(before[name], after[name]), keys))
        for name in names
    ]
    about: dict[str, Any] = {"first": first_name, "second": second_name, "first_step": first.info.step}
    about |= {"second_step": second.info.step, "tokens": first.n_tokens}
    return _sorted(Table("second minus first", ("head", "moved", *keys), rows, about), command.sort)


def timeline(command: Timeline, rows: Sequence[Row]) -> Table:
    """When each role forms, and its picture."""
    if not Path(command.source).is_dir():
        raise ValueError(f"{command.source} is no run directory")
    if command.output:
        check_output(command.output, (".png", ".svg"))
    rows = [row for row in rows if isinstance(row.get("scores"), dict)]  # as of a damaged line
    table = timeline_table(rows)
    if command.output:
        draw_timeline(rows, command.output)
        return replace(table, about={**table.about, "output": command.output})
    return table


def step_records(run: str, steps: str) -> list[str]:
    """`250,500` -> the two records that training kept. ValueError with the steps there are."""
    chosen = numbers("--steps", steps)
    if chosen is None or len(chosen) != 2:
        raise ValueError(f"--steps {steps}: give two steps such as 250,500")
    paths = [Path(run) / "records" / f"step-{step:06d}.safetensors" for step in chosen]
    if missing := [path.name for path in paths if not path.is_file()]:
        there = [
            str(int(path.stem.removeprefix("step-"))) for path in sorted(paths[0].parent.glob("step-*.safetensors"))
        ]
        raise ValueError(f"{run} keeps no record {missing[0]}; steps there: {', '.join(there) or 'none'}")
    return list(map(str, paths))


def _difference(before: Scores, after: Scores) -> Scores:
    return {key: after[key] - before[key] for key in before if key in after}


def _values(scores: Scores, keys: Iterable[str]) -> list[Value]:
    return [scores[key] if math.isfinite(scores.get(key, math.nan)) else None for key in keys]


def _sorted(table: Table, column: str) -> Table:
    return table.sorted_by(column) if column else table
