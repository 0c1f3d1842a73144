"""One more token, at the speed at which memory gives the weights: what `generate` uses where it can.

`Decoder` computes what GPT.forward computes for one new position, with fewer and quicker calls: no modules between the
operations, and products that read the weights on all threads. `decoder_for` gives it for the models that it knows; the
others decode with GPT.forward itself, and so does a model whose modules have hooks, which are to see every call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.flash import FlashAttention
from model.cache import DecodingCache, LayerCache
from model.gpt import GPT
from model.norm import rms_normalise
from model.position import rotations, turn

_SLICES = 4  # of a matrix: no fewer than threads that memory can keep busy; a residual stream must divide by it


def decoder_for(model: GPT, n_rows: int) -> "Decoder | None":
    """A Decoder where it may stand for the model's forward: float32 on CPU, pre-norm, unwatched."""
    weight = model.token_embedding.weight
    fits = (
        weight.is_cpu
        and weight.dtype == torch.float32
        and not model.training
        and model.config.norm_placement == "pre"
        and model.config.n_embd % _SLICES == 0
        and not torch.is_autocast_enabled("cpu")
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    )
    return Decoder(model, n_rows) if fits else None


class Matrix:
    """The weights (O, I) of linear layers that share their input, for products with few rows.

    One row: F.linear hands it to the BLAS as a matrix-vector product, which MKL computes on one thread; a batched
    product over slices of the matrix is the same sum on all of them, and needs no other order of the weights.
    Several rows: oneDNN's product with weights in its own order, about twice as quick, for a copy of them.
    """

    def __init__(self, n_rows: int, *layers: nn.Linear) -> None:
        weights: list[Tensor] = [layer.weight for layer in layers]
        weight = weights[0] if len(layers) == 1 else torch.cat(weights)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.packed: Tensor | None = None
        self.rest: Tensor | None = None
        if n_rows > 1 and torch.backends.mkldnn.is_available():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, n_rows)
        elif n_rows > 1:
            self.rest = weight
        else:
            self.n_out, n_in, n_sliced = *weight.shape, weight.shape[0] // _SLICES * _SLICES
            self.slices = weight[:n_sliced].view(_SLICES, -1, n_in)
            self.rest = weight[n_sliced:] if n_sliced < self.n_out else None
            self.column = (_SLICES, n_in, 1), (0, 1, n_in)  # shape and strides of the row, the same for each slice

    def __call__(self, x: Tensor) -> Tensor:
        """(R, I) -> (R, O)"""
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        if len(x) > 1:
            assert self.rest is not None
            return F.linear(x, self.rest, self.bias)
        out = torch.bmm(self.slices, x.as_strided(*self.column)).view(1, -1)
        if self.rest is not None:
            out = torch.cat((out, F.linear(x, self.rest)), dim=1)
        return out if self.bias is None else out.add_(self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Adds the product with x (R, I) to `total` (R, O) where it stands; O is a multiple of _SLICES."""
        if len(x) > 1:
            total.add_(self(x))
            return
        total.view(_SLICES, -1, 1).baddbmm_(self.slices, x.as_strided(*self.column))
        if self.bias is not None:
            total.add_(self.bias)


class Decoder:
    """Continues n_rows contexts by a token each. Holds the weights as they are when it is made."""

    @torch.inference_mode()
    def __init__(self, model: GPT, n_rows: int) -> None:
        self.model = model
        self.layers = [_Layer(block, n_rows) for block in model.blocks]
        self.norm, self.head = _norm(model.final_norm), Matrix(n_rows, model.lm_head)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        """(R,) tokens after those that `cache` has seen -> logits (R, V)."""
        config, positions = self.model.config, torch.tensor([cache.n_tokens])
        x = self.model.embed(tokens[:, None], positions, cache)[:, 0]  # (R, C), the residual stream, added to in place
        is_rope = config.position == "rope"
        turns = rotations(positions, config.head_dim, config.rope_base, x.dtype) if is_rope else None
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            layer.attend(x, turns, layer_cache)
            if layer.mlp is not None:
                layer.think(x)
        cache.n_tokens += 1
        return self.model.cap(self.head(self.norm(x)))


class _Layer:
    def __init__(self, block: Any, n_rows: int) -> None:
        attn, self.mlp = block.attn, block.mlp
        config, self.path, self.rule = attn.config, attn.path, attn.rule
        self.attn_norm, self.o = _norm(block.attn_norm), Matrix(n_rows, attn.o_proj)
        self.qkv = Matrix(n_rows, attn.q_proj, attn.k_proj, attn.v_proj)
        self.heads = (n_rows, config.n_head + 2 * config.kv_heads, 1, config.head_dim)
        self.sizes = (config.n_head + config.kv_heads, config.kv_heads)
        self.n_head, self.has_qk_norm = config.n_head, config.qk_norm
        # What this path does for one query is a single call; others are asked to decode.
        self.is_flash = isinstance(attn.path, FlashAttention) and attn.path.pinned == "auto"
        if block.mlp is not None:
            self.mlp_norm, self.down = _norm(block.mlp_norm), Matrix(n_rows, block.mlp.down_proj)
            gates = [block.mlp.gate_proj] if block.mlp.gate_proj is not None else []
            self.up = Matrix(n_rows, block.mlp.up_proj, *gates)

    def attend(self, x: Tensor, turns: tuple[Tensor, Tensor] | None, cache: LayerCache) -> None:
        qk, v = self.qkv(self.attn_norm(x)).view(self.heads).split(self.sizes, dim=1)  # (R, H + G, 1, D), (R, G, 1, D)
        if self.has_qk_norm:
            qk = rms_normalise(qk)
        if turns is not None:
            qk = turn(qk, turns)
        q, k = qk.split((self.n_head, v.shape[1]), dim=1)
        if self.is_flash:
            k, v = cache.append(k, v)
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        else:
            out = self.path.decode(q, k, v, rule=self.rule, cache=cache)
        self.o.add_to(x, out.reshape(len(x), -1))

    def think(self, x: Tensor) -> None:
        hidden = self.up(self.mlp_norm(x))
        parts = (hidden,) if self.mlp.gate_proj is None else hidden.chunk(2, dim=1)
        self.down.add_to(x, self.mlp.activate(*parts))


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    """What a LayerNorm or RMSNorm computes, without the call of a module."""
    shape, weight, eps = module.normalized_shape, module.weight, module.eps
    if isinstance(module, nn.RMSNorm):
        return lambda x: torch.rms_norm(x, shape, weight, eps)
    bias = module.bias
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
