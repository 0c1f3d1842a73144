"""The effects as tables: what `probe.py ablate`, `knockout`, `patch` and `lens` print."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from model import GPT
from probes.causal.effects import (
    EdgeEffects,
    Patches,
    ablation_losses,
    divergence,
    edge_effects,
    knockout_change,
    rank_correlation,
)
from probes.causal.interventions import Head, How, check_heads
from probes.causal.lens import logit_attribution, logit_lens
from probes.table import Table, Value

Name = Callable[[int], str]  # the label of a token id


def parse_heads(model: GPT, text: str) -> list[Head]:
    """`1.3,2.0` -> [(1, 3), (2, 0)]; all heads for `all`. ValueError with the choices."""
    n_layer, n_head = model.config.n_layer, model.config.n_head
    if text == "all":
        return list(product(range(n_layer), range(n_head)))
    parts = [part.split(".") for part in text.split(",")]
    if not all(len(part) == 2 and part[0].isdecimal() and part[1].isdecimal() for part in parts):
        last = f"{n_layer - 1}.{n_head - 1}"
        raise ValueError(
            f"--heads {text} names no heads; give layer.head from 0.0 to {last}, several with commas, or all"
        )
    heads = [(int(layer), int(head)) for layer, head in parts]
    check_heads(model, heads)
    return list(dict.fromkeys(heads))


def ablation_table(
    model: GPT, tokens: Tensor, heads: Sequence[Head], how: How, keep_patterns: bool, *, copies: bool = False
) -> Table:
    """A row a head, and one for all of them together. copies: each of the tokens (N, 2·L) is a sequence twice, and the
    loss is that of the second copies, from their second token on; `about` has that of the first copies."""
    groups = [[head] for head in heads] + ([list(heads)] if len(heads) > 1 else [])
    length = tokens.shape[-1] // 2
    counted = slice(length, None) if copies else slice(None)
    clean, *losses = ablation_losses(model, tokens, groups, how=how, keep_patterns=keep_patterns, counted=counted)
    names = [f"{layer}.{head}" for layer, head in heads] + ["together"]
    rows = [(name, loss, loss - clean) for name, loss in zip(names, losses, strict=False)]
    about = {"loss": clean, "how": how, "keep_patterns": keep_patterns, "tokens": tokens.numel()}
    if copies:
        about["first_copies"] = ablation_losses(model, tokens, [], counted=slice(length - 1))[0]
    return Table("loss in nats a token when a head's output is replaced", ("head", "loss", "change"), rows, about)


def knockout_table(
    model: GPT, tokens: Tensor, edges: Sequence[tuple[int, int]], layers: Sequence[int], name: Name, n_shown: int = 10
) -> Table:
    """The likeliest next tokens, before and after; the divergence of all of them in `about`."""
    before, after = knockout_change(model, tokens, edges, layers)
    likeliest = torch.maximum(before, after).topk(min(n_shown, len(before))).indices.tolist()
    rows = [(name(i), i, float(before[i]), float(after[i]), float(after[i] - before[i])) for i in likeliest]
    divergences = {"kl": divergence(before, after), "total_variation": float((after - before).abs().sum() / 2)}
    about = {**divergences, "edges": [list(edge) for edge in edges], "layers": list(layers), "tokens": len(tokens)}
    columns = ("token", "id", "before", "after", "change")
    return Table("probability of the next token without the edges", columns, rows, about)


def rank_table(model: GPT, tokens: Tensor, query: int) -> Table:
    """Attention against effect: a row a head and one for the edges of all heads."""
    heads = list(edge_effects(model, tokens, query))
    rows = [_rank_row(f"{one.layer}.{one.head}", [one]) for one in heads] + [_rank_row("all", heads)]
    columns = ("head", "edges", "output", "distribution", "small_edges", "largest_small_effect")
    about = {"query": query, "tokens": len(tokens), "correlation": "Spearman", "small": "weight below 0.01"}
    return Table("rank correlation of an edge's weight and its effect", columns, rows, about)


def _rank_row(name: str, heads: Sequence[EdgeEffects]) -> tuple[Value, ...]:
    weights = torch.cat([one.weights for one in heads])
    output, distribution = (torch.cat([getattr(one, part) for one in heads]) for part in ("output", "distribution"))
    small = weights < 0.01
    largest = float(distribution[small].max()) if small.any() else None
    ranks = rank_correlation(weights, output), rank_correlation(weights, distribution)
    return name, len(weights), *ranks, int(small.sum()), largest


def patch_table(patches: Patches, names: Sequence[tuple[str, str]]) -> Table:
    """A row a position, then a row a head; a column a layer. names: of each position, in the clean and the corrupted
    text."""
    n_layer = len(patches.stream)
    columns = ("part", "index", "clean", "corrupted", *(f"layer_{layer}" for layer in range(n_layer)))
    rows: list[tuple[Value, ...]] = [
        ("position", i, *names[i], *scores) for i, scores in enumerate(patches.stream.T.tolist())
    ]
    rows += [("head", i, "", "", *scores) for i, scores in enumerate(patches.heads.T.tolist())]
    about = {"clean_difference": patches.clean, "corrupted_difference": patches.corrupted, "tokens": len(names)}
    return Table("share of the logit difference that the clean run's part restores", columns, rows, about)


def lens_table(model: GPT, tokens: Tensor, name: Name, n_shown: int = 5) -> Table:
    """What the last position predicts after each layer: the likeliest tokens, a row each."""
    rows: list[tuple[Value, ...]] = []
    for depth, logits in enumerate(logit_lens(model, tokens)[:, -1]):
        place = "embedding" if depth == 0 else f"layer {depth - 1}"
        best = logits.double().softmax(-1).topk(min(n_shown, len(logits)))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows += [(place, rank, name(token), token, value) for rank, (token, value) in enumerate(found, start=1)]
    columns = ("after", "rank", "token", "id", "probability")
    return Table("what the residual stream predicts after each layer", columns, rows, {"tokens": len(tokens)})


def attribution_table(model: GPT, tokens: Tensor, target: int, other: int | None, name: Name) -> Table:
    """A row a part, the strongest first."""
    parts = logit_attribution(model, tokens, target, other)
    rows = sorted(parts.items(), key=lambda part: -abs(part[1]))
    about = {"sum": sum(parts.values()), "target": name(target), "other": None if other is None else name(other)}
    what = "the logit of the target" if other is None else "the logit of the target less that of the other"
    return Table(f"what each part adds to {what}", ("part", "logit"), rows, {**about, "tokens": len(tokens)})
