"""The contract of an attention path: HOW the weighted sum over the allowed pairs is computed."""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from model.attention.mask import MaskRule

_ROWS = 256  # rows of scores that log_sum_exp holds at once


class AttentionPath(nn.Module):
    """softmax(scores) @ v over the pairs that a MaskRule allows. No parameters.

    Axes: B batch, H heads, G key-value heads (H is a multiple of G; G < H is grouped-query attention), T queries,
    S keys, D head_dim. The queries are the last T of the S positions. All tensors share one dtype; autocast is off
    when a path is called, so a path alone decides what it computes in.

    scale    factor on q·k; None means 1/√D (Vaswani et al. 2017, section 3.2.1).
    softcap  c > 0 bounds the scaled scores to (-c, c) by c·tanh(s/c) (Gemma 2, 2024); 0 is off.
    alibi    adds -slope_h·|i - j| to the scores (Press et al. 2022).
    dropout  share of the weights set to zero in training.
    """

    supports: ClassVar[frozenset[str]] = frozenset()
    kind: ClassVar[str] = "softmax"  # or linear: how `factors` make a weight

    def __init__(
        self, *, scale: float | None = None, softcap: float = 0.0, alibi: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1 or not 0 <= softcap < float("inf"):
            raise ValueError(f"dropout {dropout} must be in [0, 1), and softcap {softcap} 0 or more")
        self.scale = scale
        self.softcap = softcap
        self.alibi = alibi
        self.dropout = dropout

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    @classmethod
    def option_names(cls) -> set[str]:
        """The keyword arguments of the constructor, those of the classes that it builds on included."""
        names: set[str] = set()
        for base in (base for base in cls.__mro__ if issubclass(base, AttentionPath)):
            kinds = inspect.signature(base.__init__).parameters.values()
            names |= {p.name for p in kinds if p.kind is p.KEYWORD_ONLY}
        return names

    def option_words(self) -> set[str]:
        """The capabilities that the options of this instance ask for."""
        asked = {"softcap": self.softcap > 0, "alibi": self.alibi, "dropout": self.dropout > 0}
        return {word for word, is_asked in asked.items() if is_asked}

    def rule_for(self, rule: MaskRule) -> MaskRule:
        """The rule that this path really follows when it is given `rule` (a window path narrows it)."""
        return rule

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        """`forward`, after a look at the rule: a path that ignored a window would give plausible wrong numbers."""
        if not rule.words() <= self.supports:
            from model.attention import require  # at the top it would be circular; here it only words the refusal

            require(self, rule.words())
        if q.shape[1] % k.shape[1] or q.shape[2] > k.shape[2]:
            raise ValueError(
                f"{q.shape[1]} query heads on {k.shape[1]} key-value heads, {q.shape[2]} queries on {k.shape[2]} keys: "
                f"the heads must divide, and the queries are the last of the keys' positions"
            )
        return super().__call__(q, k, v, rule=rule)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        """q (B, H, T, D), k and v (B, G, S, D) -> out (B, H, T, D) in the dtype of q."""
        raise NotImplementedError

    def weights(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> Tensor:
        """The explicit matrix (B, H, T, S) in at least float32; rows sum to one. For small inputs: O(T·S) memory."""
        rows = query_positions(q, k)
        return self.scores(q, k, rule=self.rule_for(rule), rows=rows).softmax(-1)

    def log_sum_exp(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> Tensor:
        """Natural logarithm of each row's normaliser, (B, H, T) in at least float32.

        One block of rows at a time: O(S) memory a row block, never (T, S).
        """
        rule = self.rule_for(rule)
        blocks = zip(q.split(_ROWS, dim=2), query_positions(q, k).split(_ROWS), strict=True)
        return torch.cat([self.scores(part, k, rule=rule, rows=rows).logsumexp(-1) for part, rows in blocks], dim=-1)

    def factors(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> tuple[Tensor, Tensor, Tensor]:
        """What a weight follows from, in O(T) memory: a for the queries, b for the keys, and z (B, H, T), the natural
        logarithm of each row's normaliser. kind softmax: exp(score(a_i, b_j) - z_i); linear: a_i·b_j·exp(-z_i)."""
        return q, k, self.log_sum_exp(q, k, rule=rule)

    def scores(self, q: Tensor, k: Tensor, *, rule: MaskRule, rows: Tensor) -> Tensor:
        """What the softmax is taken of, (B, H, T, S) in at least float32: -inf where `rule` forbids the pair.

        rows (T,): the positions of the queries among the S keys.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        columns = torch.arange(k.shape[2], device=q.device)
        scores = q.to(dtype) @ repeat_groups(k, q.shape[1]).to(dtype).mT * self.scale_for(q)
        if self.softcap > 0:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi:
            distance = (rows[:, None] - columns[None, :]).abs()
            scores = scores - alibi_slopes(q.shape[1], dtype, q.device)[:, None, None] * distance
        return scores.masked_fill(~rule.allowed(rows, columns), float("-inf"))

    def scale_for(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> str:  # noqa: ARG002
        """The name of the implementation that `forward` runs for these inputs."""
        return self.name

    def decode(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule, cache: Any) -> Tensor:
        """Attention of T new positions over everything that `cache` (model/cache.py) remembers and themselves.

        k and v hold the new positions only and are added to the cache.
        """
        k, v = cache.append(k, v)
        return self(q, k, v, rule=rule)


def query_positions(q: Tensor, k: Tensor) -> Tensor:
    """(T,): the queries are the last T of the S positions."""
    return torch.arange(k.shape[-2] - q.shape[-2], k.shape[-2], device=q.device)


def repeat_groups(x: Tensor, n_head: int) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D): key-value head g serves the H/G query heads from g·H/G on."""
    return x if x.shape[1] == n_head else x.repeat_interleave(n_head // x.shape[1], dim=1)


def alibi_slopes(n_head: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(H,) slopes 2^(-8(h+1)/H): the geometric sequence of Press et al. 2022, section 3."""
    return 2.0 ** (-8.0 * torch.arange(1, n_head + 1, dtype=dtype, device=device) / n_head)
