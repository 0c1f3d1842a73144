"""Causal multi-head attention from scratch: project, split into heads, attend along a path, join, project back."""

import torch
from torch import Tensor, nn

from model.attention import build, path_class, require
from model.attention.mask import MaskRule
from model.attention.path import AttentionPath
from model.cache import LayerCache
from model.config import ModelConfig
from model.norm import rms_normalise
from model.position import rotations, turn


class MultiHeadAttention(nn.Module):
    """x (B, T, C) -> (B, T, C).

    The path is a submodule that sees q, k and v exactly as its kernel does (after QK-norm and RoPE) and returns the
    output of each head, so a forward hook on it is all that a probe needs.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.n_embd, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, width, bias=config.bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(width, width, bias=config.bias)
        self.path = build_path(config, config.paths[layer])
        is_windowed = config.window > 0 and "window" in self.path.supports
        self.rule = MaskRule(
            causal=config.causal,
            window=config.window if is_windowed else None,
            n_global=config.n_global if is_windowed else 0,
        )
        require(self.path, self.rule.words())

    def forward(self, x: Tensor, *, positions: Tensor, cache: LayerCache | None = None) -> Tensor:
        """positions (T,) are the places of the T tokens in the whole context."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # once, and not for each of the three projections
        q = self.split_heads(self.q_proj(x))  # (B, H, T, D)
        k = self.split_heads(self.k_proj(x))  # (B, G, T, D)
        v = self.split_heads(self.v_proj(x))
        if self.config.qk_norm or self.config.position == "rope":
            q, k = self._place(q, k, positions)
        with torch.autocast(x.device.type, enabled=False):
            if cache is None:
                out = self.path(q, k, v, rule=self.rule)
            else:
                out = self.path.decode(q, k, v, rule=self.rule, cache=cache)
        return self.o_proj(self.join_heads(out))

    def _place(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """QK-norm and RoPE, on one contiguous copy of each in at least float32."""
        dtype, exact = q.dtype, torch.promote_types(q.dtype, torch.float32)
        # Mixed layouts would take five times as long.
        q, k = (part.to(exact, memory_format=torch.contiguous_format) for part in (q, k))
        if self.config.qk_norm:
            q, k = rms_normalise(q), rms_normalise(k)
        if self.config.position == "rope":
            turns = rotations(positions, self.config.head_dim, self.config.rope_base, exact)
            q, k = turn(q, turns), turn(k, turns)
        return q.to(dtype), k.to(dtype)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, H·D) -> (B, H, T, D)"""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def join_heads(self, out: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, H·D): the heads side by side"""
        return out.transpose(1, 2).flatten(2)


def build_path(config: ModelConfig, name: str) -> AttentionPath:
    """The path `name` with those of the configuration's options that it has."""
    options = {
        "kernel": config.flash_kernel,
        "feature_map": config.linear_feature_map,
        "dropout": config.attention_dropout,
        "softcap": config.attention_softcap,
        "alibi": config.position == "alibi",
    }
    known = path_class(name).option_names()
    return build(name, **{option: value for option, value in options.items() if option in known})
