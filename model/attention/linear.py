"""Linear attention (Katharopoulos et al. 2020): weights φ(q)·φ(k)/z instead of a softmax, in O(n) time.

Without the exponential the sum over keys can be taken before the query is known: a running state Σ φ(k) vᵀ of fixed
size (D, D) stands for all earlier positions. Within a chunk the explicit form is quicker; the state links the chunks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.mask import MaskRule
from model.attention.path import AttentionPath, query_positions, repeat_groups

# Each makes every component positive, so that weights are positive and z is never 0.
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    # elu(x) + 1, Katharopoulos et al. 2020, equation 7; added up in this order it is not rounded to 0 below x = -17.
    "elu": lambda x: F.relu(x) + x.clamp(max=0).exp(),
    "relu": lambda x: F.relu(x) + 1e-3,
    "softmax": lambda x: x.softmax(-1),  # over the D channels: Shen et al. 2021
}
State = tuple[Tensor, Tensor]  # Σ φ(k) vᵀ (B, G, D, D) and Σ φ(k) (B, G, D)


class LinearAttention(AttentionPath):
    """feature_map: φ, one of elu, relu, softmax. chunk: positions that are computed in the explicit form at once.

    No softmax: there is no log-sum-exp, and the scale of the scores has no meaning. Computed in at least float32.
    """

    supports = frozenset({"bidirectional", "cache", "backward_cpu", "backward_cuda"})
    kind = "linear"

    def __init__(self, *, feature_map: str = "elu", chunk: int = 64, **options: Any) -> None:
        super().__init__(**options)
        if feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map is {feature_map!r}; choose one of: {', '.join(FEATURE_MAPS)}")
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be at least 1")
        if self.scale is not None:
            raise ValueError("linear attention has no softmax scale; leave the option scale out")
        self.feature_map = FEATURE_MAPS[feature_map]
        self.chunk = chunk

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        n_before = k.shape[2] - q.shape[2] if rule.causal else k.shape[2]
        dtype = torch.promote_types(q.dtype, torch.float32)
        features, values = self.feature_map(k.to(dtype)), v.to(dtype)
        state = summarise(features[:, :, :n_before], values[:, :, :n_before])
        if not rule.causal:
            return read(self.feature_map(q.to(dtype)), state).to(q.dtype)
        out, _ = self._causal(q, features[:, :, n_before:], values[:, :, n_before:], state)
        return out

    def decode(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule, cache: Any) -> Tensor:
        """What is remembered is the state: its size does not grow with the context."""
        del rule  # decoding is causal by nature
        dtype = torch.promote_types(q.dtype, torch.float32)
        features, values = self.feature_map(k.to(dtype)), v.to(dtype)
        state = summarise(features[:, :, :0], values[:, :, :0]) if cache.state is None else cache.state
        out, cache.state = self._causal(q, features, values, state)
        return out

    def weights(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> Tensor:
        """φ(q)·φ(k)/z, (B, H, T, S): what each key's value is multiplied by."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        features = self.feature_map(repeat_groups(k, q.shape[1]).to(dtype))
        products = self.feature_map(q.to(dtype)) @ features.mT
        allowed = rule.allowed(query_positions(q, k), torch.arange(k.shape[2], device=q.device))
        products = products.masked_fill(~allowed, 0.0)
        return products / products.sum(-1, keepdim=True)

    def log_sum_exp(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> Tensor:  # noqa: ARG002
        raise ValueError("linear attention is no softmax: it has no log-sum-exp")

    def factors(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> tuple[Tensor, Tensor, Tensor]:
        """φ(q), φ(k) and ln z, in at least float32."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q_features, k_features = self.feature_map(q.to(dtype)), self.feature_map(k.to(dtype))
        wide = dtype if q.device.type == "mps" else torch.float64  # a long sum would be rounded at every step
        totals = k_features.cumsum(2, dtype=wide) if rule.causal else k_features.sum(2, keepdim=True, dtype=wide)
        totals = repeat_groups(totals[:, :, -q.shape[2] :], q.shape[1])  # (B, H, T or 1, D)
        return q_features, k_features, (q_features.to(wide) * totals).sum(-1).log().to(dtype)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        """q (B, H, T, D), features k and values v (B, G, T, D) after what `state` sums up -> out and the new state."""
        n_tokens, dtype = q.shape[2], k.dtype
        n_chunks = -(-n_tokens // self.chunk)
        n_padding = n_chunks * self.chunk - n_tokens
        # Padding is added after φ, as zeros, which change no sum.
        q_features, k, v = (
            F.pad(x, (0, 0, 0, n_padding)).unflatten(2, (n_chunks, self.chunk))
            for x in (self.feature_map(q.to(dtype)), k, v)
        )  # (B, H or G, N, C, D)
        products, totals = k.mT @ v, k.sum(-2)  # of each chunk: (B, G, N, D, D), (B, G, N, D)
        products = torch.cat((state[0].unsqueeze(2), products), dim=2).cumsum(2)  # before each chunk, and after all
        totals = torch.cat((state[1].unsqueeze(2), totals), dim=2).cumsum(2)
        groups = q_features.unflatten(1, (k.shape[1], -1))  # (B, G, R, N, C, D): R heads share a group
        inside = (groups @ k.unsqueeze(2).mT).tril()  # (B, G, R, N, C, C)
        weighted = inside @ v.unsqueeze(2) + groups @ products[:, :, None, :-1]
        normaliser = inside.sum(-1) + (groups @ totals[:, :, None, :-1, :, None]).squeeze(-1)
        # Padded queries are all zero, so is their normaliser; what they would give is cut off.
        out = weighted.flatten(3, 4)[..., :n_tokens, :] / normaliser.flatten(3, 4)[..., :n_tokens, None]
        # Copies: a view would keep the states of all chunks for as long as a decoder keeps the last.
        return out.flatten(1, 2).to(q.dtype), (products[:, :, -1].clone(), totals[:, :, -1].clone())


def summarise(features: Tensor, values: Tensor) -> State:
    """All these keys (B, G, S, D) and values as one state."""
    return features.mT @ values, features.sum(-2)


def read(q_features: Tensor, state: State) -> Tensor:
    """(B, H, T, D) queries on a state that holds every key they may see."""
    products, totals = (repeat_groups(part, q_features.shape[1]) for part in state)
    return q_features @ products / (q_features @ totals.unsqueeze(-1))
