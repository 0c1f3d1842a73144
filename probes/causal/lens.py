"""Lenses: what the stream predicts after each layer, and what each part of the model adds to a logit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from model import GPT
from probes.causal.interventions import streams
from probes.checks.path_check import layer_calls


@torch.no_grad()
def logit_lens(model: GPT, tokens: Tensor) -> Tensor:
    """tokens (T,) -> (L + 1, T, V): the logits that the final norm and the head read from the residual stream that
    enters each layer, and last the model's own (nostalgebraist 2020)."""
    return torch.cat([model.logits(model.final_norm(stream)) for stream in streams(model, tokens[None])])


@torch.no_grad()
def logit_attribution(model: GPT, tokens: Tensor, target: int, other: int | None = None) -> Mapping[str, float]:
    """What each part adds to logit(target) - logit(other) after the last of `tokens` (T,); without `other`, to
    logit(target). Parts: embedding, each head as `layer.head`, each layer's `attn bias` and `mlp`, and `norm bias`.

    The parts of the residual stream add up, and so do their logits once the final norm's scale is frozen at its value
    for this text; the sum is exact, before logit_softcap. float64. ValueError for post-norm blocks, whose stream is no
    sum.
    """
    if model.config.norm_placement != "pre":
        raise ValueError("attribution needs a residual stream that is a sum; this model's blocks are post-norm")
    kept: list[Tensor] = []
    blocks: Any = model.blocks
    handles = [b.mlp.register_forward_hook(lambda _, __, out: kept.append(out)) for b in blocks if b.mlp is not None]
    try:
        calls = layer_calls(model, tokens[None])
    finally:
        for handle in handles:
            handle.remove()
    flow = streams(model, tokens[None])
    weight = model.lm_head.weight.double()
    unembed = weight[target] - (0 if other is None else weight[other])
    direction, constant = _through_norm(model.final_norm, flow[-1][0, -1].double(), unembed)
    parts = {"embedding": flow[0][0, -1]}
    for layer, call in enumerate(calls):
        o_proj = blocks[layer].attn.o_proj
        for head, matrix in enumerate(o_proj.weight.double().chunk(model.config.n_head, dim=1)):  # (C, D)
            parts[f"{layer}.{head}"] = matrix @ call.out[0, head, -1].double()
        if o_proj.bias is not None:
            parts[f"attn bias {layer}"] = o_proj.bias
        if kept:
            parts[f"mlp {layer}"] = kept[layer][0, -1]
    return {name: float(part.double() @ direction) for name, part in parts.items()} | constant


def _through_norm(norm: Any, x: Tensor, unembed: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The direction (C,) along which a part of the stream x (C,) adds to norm(x) @ unembed, and what the norm adds."""
    direction = unembed * norm.weight.double()
    if isinstance(norm, nn.LayerNorm):
        scale = (x.var(correction=0) + norm.eps).sqrt()
        bias = {} if norm.bias is None else {"norm bias": float(norm.bias.double() @ unembed)}
        # (p - mean(p)) @ direction = p @ (direction - mean(direction)): the norm takes the mean away.
        return (direction - direction.mean()) / scale, bias
    return direction / (x.square().mean() + norm.eps).sqrt(), {}
