"""Head scores: what a head does, in one number a role. Heads are named layer.head, both from 0.

previous       mean over i ≥ 1 of A[i, i-1] (Olsson et al. 2022).
duplicate      L tokens twice: mean over the second half of A[i, i-L] (Wang et al. 2022).
induction      The same tokens: mean over the second half of A[i, i-L+1] (Olsson et al. 2022).
prefix         L tokens four times: mean over i ≥ L of the attention on the tokens after all earlier copies (Olsson).
confidence, entropy, entropy_share, distance, offset
               Means over rows, see statistics.RowStatistics; offset is the commonest place of the largest weight.
positional     Share of rows whose largest weight sits at that offset (Voita et al. 2019).
sink           Mean of A[i, 0] over the first 64 rows (Gu et al. 2025).
received       The largest column mean, of keys that half of the rows may see (Zhang et al. 2023).
copying        Σλ / Σ|λ|, λ the eigenvalues of W_U W_OV W_E (Elhage et al. 2021).
q_composition, k_composition, v_composition
               ‖M W_OV(1)‖ / (‖M‖ ‖W_OV(1)‖) above its mean for random matrices, with the earlier head where it is
               largest; M is W_QKᵀ, W_QK or W_OV (Elhage et al. 2021).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model import GPT, ModelConfig
from probes.capture import capture
from probes.record import AttentionRecord
from probes.statistics import received, statistics

Scores = dict[str, float]
Matrices = tuple[Tensor, Tensor, Tensor, Tensor]  # W_Q, W_K, W_V (D, C) and W_O (C, D) of one head, float64

# In the order in which they are shown; what a record or a layer cannot have is left out.
SCORES = (
    *("previous", "duplicate", "induction", "prefix", "sink", "entropy_share", "confidence", "positional", "offset"),
    *("entropy", "distance", "received", "copying", "q_composition", "k_composition", "v_composition"),
)

# role: (the score that earns it, from which value on). A head may have several roles, or none.
ROLES: dict[str, tuple[str, float]] = {
    "previous token": ("previous", 0.4),
    "duplicate token": ("duplicate", 0.4),
    "induction": ("induction", 0.4),
    "sink": ("sink", 0.3),  # Gu et al. 2025
    "positional": ("positional", 0.9),  # Voita et al. 2019
    "uniform": ("entropy_share", 0.95),
}
_SINK_ROWS = 64
_RANDOM_DRAWS = 8


class HeadName(NamedTuple):
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"


def score_heads(
    model: GPT,
    *,
    n_valid_tokens: int | None = None,
    text: AttentionRecord | None = None,
    n_draws: int = 10,
    seed: int = 0,
    token_bytes: Callable[[int], bytes] | None = None,
    **about: Any,
) -> tuple[dict[HeadName, Scores], AttentionRecord]:
    """All scores of all heads, and the record of the random tokens.

    duplicate and induction are of random tokens twice, prefix of `n_draws` draws of random tokens four times; what can
    be said of any text is of `text`, or without it of the same random tokens. n_valid_tokens: ids from here on are
    padding and not drawn. about: for `capture`, such as dtype and step. ValueError when block_size is below 8.
    """
    tokens = repeated_tokens(model.config, 2, n_valid_tokens, seed)
    names = None if token_bytes is None else [token_bytes(token) for token in tokens.tolist()]
    repeated = capture(model, tokens, token_bytes=names, **about)
    draws = [repeated_tokens(model.config, 4, n_valid_tokens, seed + 1 + draw) for draw in range(n_draws)]
    fours = [score_record(capture(model, tokens, **about), only={"prefix"}) for tokens in draws]
    scores = score_record(repeated)
    if text is not None:
        for name, of_text in score_record(text).items():
            scores[name] |= {key: value for key, value in of_text.items() if key not in ("duplicate", "induction")}
    parameters = score_parameters(model)
    for name in scores:
        scores[name]["prefix"] = fmean(four[name]["prefix"] for four in fours)
        scores[name] |= parameters[name]
    return scores, repeated


def score_record(record: AttentionRecord, only: set[str] | None = None) -> dict[HeadName, Scores]:
    """The scores of each head that a record gives: those of repeated tokens when its tokens are a repeated sequence.
    `only` leaves out what is not asked for."""
    period = period_of(record.info.token_ids)
    names = [HeadName(layer, head) for layer in record.layers for head in range(record.n_head)]
    scorers: dict[str, Callable[[HeadName], float | Scores]] = {
        "previous": lambda name: _on_diagonals(record, name, [(1, 1)]),
        "statistics": lambda name: _of_rows(record, name),
        "received": lambda name: _largest_received(record, name),
    }
    if period is not None and record.n_tokens == 2 * period:
        scorers["duplicate"] = lambda name: _on_diagonals(record, name, [(period, period)])
        scorers["induction"] = lambda name: _on_diagonals(record, name, [(period, period - 1)])
    if period is not None:
        starts = [copy * period for copy in range(1, record.n_tokens // period)]
        scorers["prefix"] = lambda name: _on_diagonals(record, name, [(start, start - 1) for start in starts])
    scores: dict[HeadName, Scores] = {name: {} for name in names}
    for key, scorer in scorers.items():
        for name in names if only is None or key in only else ():
            value = scorer(name)
            scores[name] |= value if isinstance(value, dict) else {key: value}
    return scores


def roles(scores: Scores) -> str:
    """The roles that a head has, each with the number that earned it: `induction 0.83`."""
    earned = [f"{role} {scores[key]:.2f}" for role, (key, least) in ROLES.items() if scores.get(key, -1.0) >= least]
    return ", ".join(earned)


def repeated_tokens(config: ModelConfig, n_copies: int, n_valid_tokens: int | None = None, seed: int = 0) -> Tensor:
    """(n_copies·L,) int64: L random tokens n_copies times, L as block_size allows, at most 64 for two copies and 25 for
    more. All L are different where the vocabulary allows it."""
    n_tokens, n_valid = config.block_size // n_copies, n_valid_tokens or config.vocab_size
    period = min(n_tokens, 64 if n_copies == 2 else 25)
    if period < 2:
        raise ValueError(f"{n_copies} copies of two tokens are longer than this model's block_size {config.block_size}")
    generator = torch.Generator().manual_seed(seed)
    if n_valid >= period:
        return torch.randperm(n_valid, generator=generator)[:period].repeat(n_copies)
    return torch.randint(n_valid, (period,), generator=generator).repeat(n_copies)


def period_of(token_ids: Sequence[int]) -> int | None:
    """L when the tokens are a sequence of L ≥ 2 tokens, given twice or more often; None otherwise."""
    n = len(token_ids)
    ids = tuple(token_ids)
    return next((p for p in range(2, n // 2 + 1) if n % p == 0 and ids[p:] == ids[:-p]), None)


@torch.no_grad()
def score_parameters(model: GPT) -> dict[HeadName, Scores]:
    """The scores that follow from the parameters alone; composition with no earlier head is left out.

    The gains of the norms before attention and before the head are part of the matrices (pre-norm models); what the
    norms divide by is not, nor are RoPE's rotations: W_QK is that of equal positions.
    """
    matrices = dict(_head_matrices(model))
    config = model.config
    unembed = model.lm_head.weight.double().cpu() * _gain(model.final_norm)  # (V, C)
    tokens = model.token_embedding.weight.double().cpu().T @ unembed  # W_E W_U (C, C)
    baseline = _random_composition(config.head_dim, config.n_embd)
    scores: dict[HeadName, Scores] = {}
    for name, (w_q, w_k, w_v, w_o) in matrices.items():
        # W_U W_OV W_E is (V, V) of rank D; W_V W_E W_U W_O, (D, D), has the same eigenvalues, zeros apart.
        eigenvalues = torch.linalg.eigvals(w_v @ tokens @ w_o)
        scores[name] = {"copying": float(eigenvalues.sum().real / eigenvalues.abs().sum().clamp_min(1e-30))}
        earlier = [head for other, head in matrices.items() if other.layer < name.layer]
        seconds = {"q": (w_k.T, w_q), "k": (w_q.T, w_k), "v": (w_o, w_v)}
        for kind, second in seconds.items() if earlier else ():
            values = [composition(second, (first[3], first[2])) for first in earlier]
            scores[name][f"{kind}_composition"] = max(values) - baseline
    return scores


def composition(second: tuple[Tensor, Tensor], first: tuple[Tensor, Tensor]) -> float:
    """‖M₂ M₁‖_F / (‖M₂‖_F ‖M₁‖_F), each M given as a product of (C, D) and (D, C); only D×D matrices are formed."""
    (a, b), (c, d) = second, first

    def norm(left: Tensor, middle: Tensor, right: Tensor) -> float:  # ‖left middle right‖_F
        return math.sqrt(max(0.0, float((left.T @ left @ middle * (middle @ (right @ right.T))).sum())))

    eye = torch.eye(b.shape[0], dtype=b.dtype)
    return norm(a, b @ c, d) / max(norm(a, eye, b) * norm(c, eye, d), 1e-30)


def _on_diagonals(record: AttentionRecord, name: HeadName, diagonals: Sequence[tuple[int, int]]) -> float:
    """The sum of the weights on these diagonals, (first row, offset i - j) each; a mean over the rows of the first."""
    total, n_rows = 0.0, record.n_tokens - diagonals[0][0]
    for first_row, offset in diagonals:
        rows = torch.arange(first_row, record.n_tokens)
        total += float(record.pairs(*name, rows, rows - offset).double().sum())
    return total / n_rows if n_rows > 0 else math.nan


def _of_rows(record: AttentionRecord, name: HeadName) -> Scores:
    rows = statistics(record, *name)
    return rows.summary() | {"sink": float(rows.sink[:_SINK_ROWS].mean())}


def _largest_received(record: AttentionRecord, name: HeadName) -> float:
    means, counts = received(record, *name)
    return float(means[counts * 2 >= counts.max()].max())


def _head_matrices(model: GPT) -> Iterator[tuple[HeadName, Matrices]]:
    config = model.config
    for layer in range(config.n_layer):
        block = model.get_submodule(f"blocks.{layer}")
        gain = _gain(block.get_submodule("attn_norm")) if config.norm_placement == "pre" else torch.ones(())
        parts = {name: block.get_parameter(f"attn.{name}_proj.weight").double().cpu() for name in "qkvo"}
        for head in range(config.n_head):
            own, group = (
                slice(place * config.head_dim, (place + 1) * config.head_dim)
                for place in (head, head // (config.n_head // config.kv_heads))
            )
            q, k, v = (parts[part][rows] * gain for part, rows in (("q", own), ("k", group), ("v", group)))
            yield HeadName(layer, head), (q, k, v, parts["o"][:, own])


def _gain(norm: nn.Module) -> Tensor:
    weight = getattr(norm, "weight", None)
    return weight.double().cpu() if isinstance(weight, Tensor) else torch.ones((), dtype=torch.float64)


def _random_composition(head_dim: int, width: int) -> float:
    """Mean composition of normal random matrices of these sizes; its spread over draws is a few per cent."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> tuple[Tensor, Tensor]:
        left, right = torch.randn(2, width, head_dim, generator=generator, dtype=torch.float64)
        return left, right.T

    return fmean(composition(draw(), draw()) for _ in range(_RANDOM_DRAWS))
