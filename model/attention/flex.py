"""FlexAttention (Dong et al. 2024): one fused kernel for any rule, compiled from the rule itself, for CUDA.

Blocks of the map in which the rule allows nothing are never computed, so windows and packed documents cost what they
hold. On CPU it runs forward only, uncompiled and with the whole map in memory: to check, not to train.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.attention.mask import MaskRule
from model.attention.path import AttentionPath, alibi_slopes


class FlexAttention(AttentionPath):
    """Every rule and option but dropout."""

    supports = frozenset(
        {"window", "globals", "documents", "bidirectional", "softcap", "alibi", "cache", "backward_cuda", "log_sum_exp"}
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> Tensor:
        return self.attend(q, k, v, rule)[0]

    def log_sum_exp(self, q: Tensor, k: Tensor, *, rule: MaskRule) -> Tensor:
        return self.attend(q, k, k, rule)[1]

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, *, rule: MaskRule) -> str:  # noqa: ARG002
        return "flex compiled" if q.device.type == "cuda" else "flex uncompiled"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask

        if q.device.type == "cpu" and any(x.requires_grad for x in (q, k, v)):
            if torch.is_grad_enabled():
                from model.attention import available, path_class

                able = [name for name in available() if "backward_cpu" in path_class(name).supports]
                raise ValueError(f"attention path 'flex' does not train on CPU; paths that do: {', '.join(able)}")
            q, k, v = (x.detach() for x in (q, k, v))  # PyTorch refuses them on CPU even where no gradient is kept
        n_queries, n_keys = q.shape[2], k.shape[2]
        before = n_keys - n_queries  # the queries are the last T of the S positions
        batch = None if rule.documents is None else q.shape[0]
        mask = create_block_mask(_mask_mod(rule, before), batch, None, n_queries, n_keys, device=str(q.device))
        return _kernel(q.device.type)(
            q,
            k,
            v,
            score_mod=self._score_mod(q, before),
            block_mask=mask,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_lse=True,
        )

    def _score_mod(self, q: Tensor, before: int) -> Callable[..., Tensor] | None:
        if not self.softcap and not self.alibi:
            return None
        softcap, is_alibi = self.softcap, self.alibi
        slopes = alibi_slopes(q.shape[1], torch.promote_types(q.dtype, torch.float32), q.device)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
            if softcap > 0:
                score = softcap * torch.tanh(score / softcap)
            return score - slopes[h] * (t + before - j).abs() if is_alibi else score

        return score_mod


def _mask_mod(rule: MaskRule, before: int) -> Callable[..., Tensor]:
    """MaskRule.allowed for one pair, in the form that the kernel compiles: only operations on tensors."""
    window, n_global, documents = rule.window, rule.n_global, rule.documents

    def mask_mod(b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
        i = t + before
        seen = j <= i if rule.causal else (i >= 0)
        if window is not None:
            seen = seen & (((i - j).abs() < window) | (i < n_global) | (j < n_global))
        if documents is not None:
            seen = seen & (documents[b, i] == documents[b, j])
        return seen

    return mask_mod


@functools.cache
def _kernel(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if device_type == "cuda":
        return torch.compile(flex_attention, dynamic=False)

    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow is said above
            return flex_attention(*args, **kwargs)

    return uncompiled
