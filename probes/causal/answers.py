"""From the flags of a command and a loaded run (training/checkpoint.py) to its table."""

from typing import Any

import torch
from torch import Tensor

from probes.arguments import check_output, numbers, tokens_of
from probes.causal.effects import patch_scores
from probes.causal.tables import (
    ablation_table,
    attribution_table,
    knockout_table,
    lens_table,
    parse_heads,
    patch_table,
    rank_table,
)
from probes.commands import Ablate, Knockout, Lens, Patch
from probes.pictures.labels import label
from probes.scores import repeated_tokens
from probes.table import Table


def ablate(command: Ablate, run: Any, tokens: list[int]) -> Table:
    heads = parse_heads(run.model, command.heads)
    if not command.repeated:
        text = _tensor(run, tokens[: command.tokens])
        return ablation_table(run.model, text, heads, command.how, command.keep_patterns)
    n_tokens = len(repeated_tokens(run.config.model, 2, run.tokenizer.vocab_size))
    seeds = range(max(1, command.tokens // n_tokens))
    draws = [repeated_tokens(run.config.model, 2, run.tokenizer.vocab_size, seed).tolist() for seed in seeds]
    return ablation_table(run.model, _tensor(run, draws), heads, command.how, command.keep_patterns, copies=True)


def knock_out(command: Knockout, run: Any) -> Table:
    tokens = _tensor(run, tokens_of(run, command.read_text(), command.unknown))
    queries = [len(tokens) - 1] if command.queries == "last" else numbers("--from", command.queries) or []
    if command.rank:
        return rank_table(run.model, tokens, queries[0])
    if not command.keys:
        raise ValueError("which key? give --to, such as 0, or --rank to try every key of one query")
    layers = numbers("--layers", command.layers) or list(range(run.config.model.n_layer))
    edges = [(query, key) for query in queries for key in numbers("--to", command.keys) or []]
    return knockout_table(run.model, tokens, edges, layers, lambda token: _name(run, token))


def patch(command: Patch, run: Any) -> Table:
    """Writes the picture too, when one is asked for."""
    for flag in ("clean", "corrupt", "answer", "other"):
        if not getattr(command, flag):
            raise ValueError(f"give --{flag}: --clean and --corrupt are texts, --answer and --other tokens")
    if command.output:
        check_output(command.output, (".png", ".svg"))
    clean, corrupt = (tokens_of(run, text, "error") for text in (command.clean, command.corrupt))
    answer, other = _token(run, "answer", command.answer), _token(run, "other", command.other)
    patches = patch_scores(run.model, _tensor(run, clean), _tensor(run, corrupt), answer, other)
    names = [(_name(run, one), _name(run, two)) for one, two in zip(clean, corrupt, strict=True)]
    table = patch_table(patches, names)
    if not command.output:
        return table

    from probes.pictures.heat import draw_patches

    draw_patches(patches, [one if one == two else f"{one} → {two}" for one, two in names], command.output)
    return Table(table.title, table.columns, table.rows, {**table.about, "output": command.output})


def look(command: Lens, run: Any) -> Table:
    tokens = _tensor(run, tokens_of(run, command.read_text(), command.unknown))
    if not command.target:
        return lens_table(run.model, tokens, lambda token: _name(run, token))
    target = _token(run, "target", command.target)
    other = _token(run, "other", command.other) if command.other else None
    return attribution_table(run.model, tokens, target, other, lambda token: _name(run, token))


def _tensor(run: Any, tokens: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(tokens, device=run.model.token_embedding.weight.device)


def _token(run: Any, flag: str, text: str) -> int:
    tokens: list[int] = run.tokenizer.encode(text)
    if len(tokens) != 1:
        raise ValueError(f"--{flag} {text!r} is {len(tokens)} tokens of this model; give one")
    return tokens[0]


def _name(run: Any, token: int) -> str:
    """The label of a token; of a row that only pads the vocabulary, its number."""
    return label(run.tokenizer.token_bytes(token) if token < run.tokenizer.vocab_size else b"", token)
