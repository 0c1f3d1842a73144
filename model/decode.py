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
    """A Decoder where it may stand for the model's forward: on CPU, in float32 or bfloat16 autocast, pre-norm,
    unwatched."""
    weight = model.token_embedding.weight
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    fits = (
        weight.is_cpu
        and weight.dtype == torch.float32
        and dtype in (torch.float32, torch.bfloat16)
        and not model.training
        and model.config.norm_placement == "pre"
        and model.config.n_embd % _SLICES == 0
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    )
    return Decoder(model, n_rows, dtype) if fits else None


class Matrix:
    """The weights (O, I) of linear layers that share their input, for products with few rows, in `dtype`.

    One row in float32: F.linear hands it to the BLAS as a matrix-vector product, which MKL computes on one thread; a
    batched product over slices of the matrix is the same sum on all of them, and needs no other order of the weights.
    One row in bfloat16: F.linear where oneDNN is off, see Decoder.
    Several rows: oneDNN's product with weights in its own order, about twice as quick, for a copy of them.
    """

    def __init__(self, n_rows: int, dtype: torch.dtype, *layers: nn.Linear) -> None:
        weights: list[Tensor] = [layer.weight for layer in layers]
        weight = (weights[0] if len(layers) == 1 else torch.cat(weights)).to(dtype)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self.dtype = dtype
        self.bias = torch.cat(biases).to(dtype) if biases else None
        self.packed: Tensor | None = None
        self.slices: Tensor | None = None
        self.rest: Tensor | None = weight
        if n_rows > 1 and _can_pack(dtype):
            self.packed, self.rest = torch.ops.mkldnn._reorder_linear_weight(weight, n_rows), None
        elif n_rows == 1 and dtype == torch.float32:
            n_out, n_in, n_sliced = *weight.shape, len(weight) // _SLICES * _SLICES
            self.slices = weight[:n_sliced].view(_SLICES, -1, n_in)
            self.rest = weight[n_sliced:] if n_sliced < n_out else None
            self.column = (_SLICES, n_in, 1), (0, 1, n_in)  # shape and strides of the row, the same for each slice

    def __call__(self, x: Tensor) -> Tensor:
        """(R, I) -> (R, O) in `dtype`."""
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        if self.slices is None:
            assert self.rest is not None
            out = F.linear(x.to(self.dtype), self.rest)
        else:
            out = torch.bmm(self.slices, x.as_strided(*self.column)).view(1, -1)
            if self.rest is not None:
                out = torch.cat((out, F.linear(x, self.rest)), dim=1)
        return out if self.bias is None else out.add_(self.bias)

    def write(self, x: Tensor, out: Tensor) -> None:
        """(R, I) -> `out` (R, O) in float32."""
        if self.slices is None or self.rest is not None or self.bias is not None:
            out.copy_(self(x))
        else:
            torch.bmm(self.slices, x.as_strided(*self.column), out=out.view(_SLICES, -1, 1))

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Adds the product with x, R·I numbers, to `total` (R, O) where it stands; O is a multiple of _SLICES."""
        if self.slices is None:
            total.add_(self(x.reshape(len(x), -1)))
            return
        total.view(_SLICES, -1, 1).baddbmm_(self.slices, x.as_strided(*self.column))
        if self.bias is not None:
            total.add_(self.bias)


def _can_pack(dtype: torch.dtype) -> bool:
    has_type = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.backends.mkldnn.is_available() and has_type


class Decoder:
    """Continues n_rows contexts by a token each. Holds the weights as they are when it is made.

    In bfloat16, weights and the inputs of products are rounded as under autocast; the residual stream, attention and
    its keys and values are float32, in which a CPU attends with one query several times as quickly.
    """

    @torch.inference_mode()
    def __init__(self, model: GPT, n_rows: int, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.n_rows, self.dtype = model, n_rows, dtype
        self.layers = [_Layer(block, n_rows, dtype) for block in model.blocks]
        self.norm, self.head = _norm(model.final_norm), Matrix(n_rows, dtype, model.lm_head)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        """(R,) tokens after those that `cache` has seen -> logits (R, V)."""
        if self.dtype == torch.float32:
            return self._step(tokens, cache)
        # PyTorch's own product of a bfloat16 matrix and one row is 2.5 times as quick as oneDNN's.
        before = torch.backends.mkldnn.set_flags(_enabled=self.n_rows > 1, _fp32_precision=None)
        try:
            with torch.autocast("cpu", enabled=False):  # which would round queries, keys and values, too
                return self._step(tokens, cache)
        finally:
            torch.backends.mkldnn.set_flags(_enabled=before[0], _fp32_precision=None)

    def _step(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
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
    def __init__(self, block: Any, n_rows: int, dtype: torch.dtype) -> None:
        attn, self.mlp = block.attn, block.mlp
        config, self.path, self.rule = attn.config, attn.path, attn.rule
        self.attn_norm, self.o = _norm(block.attn_norm), Matrix(n_rows, dtype, attn.o_proj)
        self.qkv = Matrix(n_rows, dtype, attn.q_proj, attn.k_proj, attn.v_proj)
        # Queries, keys and values of the token at hand, and views of them: making a view costs as much as a small sum.
        n_q, n_kv, self.has_qk_norm = config.n_head, config.kv_heads, config.qk_norm
        self.projected = torch.empty(n_rows, (n_q + 2 * n_kv) * config.head_dim)
        heads = self.projected.view(n_rows, -1, 1, config.head_dim)  # (R, H + 2·G, 1, D)
        self.qk, self.q, self.kv = heads[:, : n_q + n_kv], heads[:, :n_q], heads[:, n_q:]
        self.is_grouped = n_q != n_kv
        # What this path does for one query is a single call; others are asked to decode.
        self.is_flash = isinstance(attn.path, FlashAttention) and attn.path.pinned == "auto"
        if block.mlp is not None:
            self.mlp_norm, self.down = _norm(block.mlp_norm), Matrix(n_rows, dtype, block.mlp.down_proj)
            gates = [block.mlp.gate_proj] if block.mlp.gate_proj is not None else []
            self.up = Matrix(n_rows, dtype, block.mlp.up_proj, *gates)

    def attend(self, x: Tensor, turns: tuple[Tensor, Tensor] | None, cache: LayerCache) -> None:
        self.qkv.write(self.attn_norm(x), self.projected)
        if self.has_qk_norm:
            self.qk.copy_(rms_normalise(self.qk))
        if turns is not None:
            self.qk.copy_(turn(self.qk, turns))
        if self.is_flash:
            out = F.scaled_dot_product_attention(self.q, *cache.extend(self.kv), enable_gqa=self.is_grouped)
        else:
            k, v = self.kv.chunk(2, dim=1)
            out = self.path.decode(self.q, k, v, rule=self.rule, cache=cache)
        self.o.add_to(x, out)

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
