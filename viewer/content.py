"""What a page says besides the weights, as plain JSON: tokens, how each layer attends, scores, roles, predictions."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from probes.capture import Tokenizer, capture_text
from probes.pictures.labels import label, labels
from probes.record import AttentionRecord, LayerInfo
from probes.scores import SCORES, roles, score_heads, score_record

Scores = Mapping[str, Mapping[str, float]]  # of each head by its name, "0.1"

# Tokens of a text whose scores are shown. A few rows say nothing of a head; a long text needs a walk over every map.
_FEWEST, _MOST = 64, 4096
_MOST_LOGITS = 1 << 27  # half a gigabyte
_MOST_RECORDS = 200  # each is an open file
_N_PREDICTED = 5


@dataclass(frozen=True)
class View:
    """What one page shows: a text's record, or its records at several steps of training.

    `known` is what a model tells of a step beyond its record: `scores`, `predictions`, `ablation`.
    """

    records: Mapping[int, AttentionRecord]  # by step, ascending
    title: str = ""
    text: str = ""  # where the tokens come from
    layers: Sequence[int] | None = None  # the shown ones; None is all
    known: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, record: AttentionRecord, *, known: Mapping[str, Any] | None = None, **about: Any) -> "View":
        """One record. about: title, text, layers."""
        step = record.info.step
        return cls({step: record}, known={step: known or {}}, **about)

    def __post_init__(self) -> None:
        for record in self.records.values():
            record.check(self.layers or (), ())

    @property
    def last(self) -> AttentionRecord:
        """Of the newest step, which a page shows first."""
        return self.records[max(self.records)]

    @cached_property
    def shown_layers(self) -> list[int]:
        return sorted(set(self.last.layers if self.layers is None else self.layers))

    def thinned(self, n_steps: int) -> "View":
        """At most so many steps, evenly spaced, the last among them."""
        steps = sorted(self.records)
        if len(steps) <= n_steps:
            return self
        chosen = [steps[(i + 1) * len(steps) // n_steps - 1] for i in range(n_steps)]
        return replace(self, records={step: self.records[step] for step in chosen})

    def content(self, step: int, source: str = "embedded") -> dict[str, Any]:
        """All that the page says at this step. KeyError for a step that is not there."""
        content = page_content(self.records[step], layers=self.shown_layers, **self.known.get(step, {}))
        about = {"source": source, "title": self.title, "text": self.text, "steps": sorted(self.records)}
        return content | about


def page_content(
    record: AttentionRecord,
    *,
    layers: Sequence[int] | None = None,
    scores: Scores | None = None,
    scored: str = "this text",
    predictions: Sequence[Sequence[tuple[str, float]]] | None = None,
    ablation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Of one record. scores: by default those that follow from the record; scored: of which tokens they are."""
    info, layers = record.info, record.layers if layers is None else layers
    names = [f"{layer}.{head}" for layer in layers for head in range(record.n_head)]
    found = head_scores(record) if scores is None else scores
    rounded = {name: _rounded(found[name]) for name in names if name in found}
    first, shown = record.layer_info(layers[0]), labels(info.token_bytes, info.token_ids)
    made = {"path": first.path, "kernel": first.kernel, "dtype": info.dtype}
    return {
        **{name: getattr(record, name) for name in ("n_tokens", "n_head", "n_kv_head", "head_dim")},
        "step": info.step,
        "model": made | {"step": info.step, "checkpoint": info.checkpoint_hash[:12]},
        "tokens": {"ids": info.token_ids, "texts": info.token_texts, "labels": shown},
        "layers": [_layer(record.layer_info(layer)) for layer in layers],
        "scores": rounded,
        "scored": scored,
        "score_names": [name for name in SCORES if any(name in head for head in rounded.values())],
        "roles": {name: earned for name in rounded if (earned := roles(dict(found[name])))},
        "ablation": ablation,
        "predictions": predictions,
    }


def head_scores(record: AttentionRecord) -> dict[str, dict[str, float]]:
    """What `score_record` finds; nothing of a long text, which would have to be read as a whole before it opens."""
    return {str(name): head for name, head in score_record(record).items()} if record.n_tokens <= _MOST else {}


def view_of_model(
    model: Any,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    *,
    run: Path,
    title: str,
    layers: Sequence[int] | None = None,
    **about: Any,
) -> View:
    """Runs a model on tokens and keeps all that a page can say. run: its directory. about: for `capture`."""
    record = capture_text(model, tokenizer, tokens, layers=layers, **about)
    return View.of(record, known=known_of_model(model, tokenizer, record, run), title=title)


def view_of_kept(run: Any, **about: Any) -> View | None:
    """The records that training kept in the directory of a loaded run; None where it kept none."""
    folder = run.checkpoint_path.parent
    records, known = kept_records(folder), {}
    if run.step in records:
        known[run.step] = known_of_model(run.model, run.tokenizer, records[run.step], folder)
    return View(records, known=known, text="random tokens, twice", **about) if records else None


def known_of_model(model: Any, tokenizer: Tokenizer, record: AttentionRecord, run: Path) -> dict[str, Any]:
    """`scores`, of random tokens and where its length allows of the text, `predictions`, and the run's `ablation`."""
    text = record if _FEWEST <= record.n_tokens <= _MOST else None
    known: dict[str, Any] = {"predictions": predictions(model, tokenizer, record.info.token_ids)}
    known["ablation"] = read_ablation(run, record.info.step)
    try:
        scores, _ = score_heads(model, n_valid_tokens=tokenizer.vocab_size, text=text, n_draws=1)
        known |= {"scores": {str(name): head for name, head in scores.items()}, "scored": "random tokens"}
        known |= {"scored": "this text and random tokens"} if text else {}
    except ValueError:  # block_size is too short for repeated tokens; what the record gives remains
        pass
    return known


@torch.no_grad()
def predictions(model: Any, tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[list[tuple[str, float]]] | None:
    """What the model expects after each position: up to 5 (label, probability), likeliest first. None where the logits
    of the whole text would take more than half a gigabyte."""
    if len(token_ids) * model.config.vocab_size > _MOST_LOGITS:
        return None
    ids = torch.tensor([token_ids], device=model.token_embedding.weight.device)
    n_valid = tokenizer.vocab_size  # from here on rows only pad the vocabulary
    best = model(ids)[0].float().softmax(-1)[:, :n_valid].topk(min(_N_PREDICTED, n_valid))  # (T, 5)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(label(tokenizer.token_bytes(i), i), round(p, 6)) for i, p in zip(*row, strict=True)] for row in rows]


def read_ablation(run: Path, step: int) -> dict[str, Any] | None:
    """What `probe.py ablate` kept in the run directory; None when there is nothing readable of this step."""
    try:
        table = json.loads((run / "ablation.json").read_text(encoding="utf-8"))
        step_there, how, n_tokens, loss = (table["about"][name] for name in ("step", "how", "tokens", "loss"))
        change = {str(row["head"]): float(row["change"]) for row in table["rows"] if row["head"] != "together"}
        about = {"how": str(how), "tokens": int(n_tokens), "loss": float(loss), "change": change}
        return about if step_there == step else None
    except (OSError, LookupError, TypeError, ValueError):
        return None


def kept_records(run: Path) -> dict[int, AttentionRecord]:
    """The newest records that training kept in a run directory, by step. ValueError for a damaged one."""
    paths = sorted((run / "records").glob("step-*.safetensors"))[-_MOST_RECORDS:]
    records = [AttentionRecord.load(path) for path in paths]
    # One page is of one text and one shape: records of an earlier run in this place are left out.
    return {record.info.step: record for record in records if _shape(record) == _shape(records[-1])}


def _shape(record: AttentionRecord) -> tuple[Any, ...]:
    return record.info.token_ids, record.layers, record.n_head, record.n_kv_head, record.head_dim


def _layer(info: LayerInfo) -> dict[str, Any]:
    documents = info.rule.documents
    return vars(info) | {"rule": vars(info.rule) | {"documents": None if documents is None else documents[0].tolist()}}


def _rounded(scores: Mapping[str, float]) -> dict[str, float]:
    """Six digits; what is not finite is left out, since JSON has no word for it."""
    return {name: float(f"{value:.6g}") for name, value in scores.items() if math.isfinite(value)}
