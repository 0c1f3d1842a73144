"""What GPT() and generate() need to know, checked once. Imports no torch."""

import math
import os
from dataclasses import dataclass, fields
from typing import Literal, get_args

from model.attention import available


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a GPT. Frozen; a wrong value is refused here, with the choices."""

    n_layer: int = 4
    """Number of blocks."""
    n_head: int = 4
    """Number of query heads in a layer."""
    n_kv_head: int = 0
    """Number of key-value heads (grouped-query attention); 0 means n_head. Must divide n_head."""
    n_embd: int = 128
    """Width of the residual stream; n_head must divide it."""
    block_size: int = 128
    """Longest context in tokens."""
    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's. More rows are padding that is never sampled."""
    attention: str = "flash"
    """Attention path: a file of model/attention/. The layers take several, as in window,window,flash, in turn."""
    window: int = 0
    """Keys that a row sees, itself included, on paths that know windows; 0: no limit, or the path's own."""
    n_global: int = 0
    """The first so many tokens are exempt from the window."""
    full_attention_every: int = 0
    """Every so many layers one is full flash attention instead; 0 is never."""
    flash_kernel: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """PyTorch kernel that the path flash is pinned to."""
    linear_feature_map: Literal["elu", "relu", "softmax"] = "elu"
    """Feature map of the path linear."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation of the residual stream."""
    norm_placement: Literal["pre", "post"] = "pre"
    """Before each sub-layer (GPT-2) or after its addition (Vaswani et al. 2017)."""
    mlp: Literal["gelu", "gelu_exact", "relu2", "swiglu", "none"] = "gelu"
    """Feed-forward of a block: gelu by tanh as GPT-2, gelu_exact as nanoGPT (on CPU twice as fast); none has none."""
    position: Literal["learned", "sinusoidal", "rope", "alibi", "none"] = "learned"
    """How the order of tokens enters."""
    rope_base: float = 10000.0
    """Base of the rotation frequencies (position = rope)."""
    qk_norm: bool = False
    """Scale each query and key to unit root-mean-square before the scores."""
    bias: bool = False
    """Bias in linear layers and LayerNorm."""
    tied_head: bool = True
    """The output head is the transposed token embedding."""
    zero_outputs: bool = False
    """Projections into the residual stream start at zero, so that each block starts as the identity."""
    embedding_norm: bool = False
    """Scale each embedded position to unit root-mean-square before the first block."""
    previous_embedding: bool = False
    """Add to each position an embedding of the token before it."""
    dropout: float = 0.0
    """Share dropped of embeddings and of each sub-layer's output, in training."""
    attention_dropout: float = 0.0
    """Share dropped of the attention weights, in training; leaves the fused kernel on CPU."""
    attention_softcap: float = 0.0
    """c > 0 bounds attention scores by c·tanh(s/c); 0 is off."""
    logit_softcap: float = 0.0
    """c > 0 bounds the logits by c·tanh(l/c); 0 is off."""
    causal: bool = True
    """False lets every position see all (encoder form); such a model cannot be trained on next tokens."""

    def __post_init__(self) -> None:
        for field in fields(self):
            choices, value = get_args(field.type), getattr(self, field.name)
            if choices and value not in choices:
                raise ValueError(f"model.{field.name} is {value!r}; choose one of: {', '.join(choices)}")
        for name in ("n_layer", "n_head", "n_embd", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("vocab_size", "n_kv_head", "window", "n_global", "full_attention_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        for name in ("attention_softcap", "logit_softcap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be 0 (off) or positive")
        if not 1 < self.rope_base < math.inf:
            raise ValueError(f"model.rope_base is {self.rope_base}; it must be above 1")
        if self.n_embd % self.n_head:
            sizes = [n for n in range(1, min(self.n_embd, 10_000) + 1) if self.n_embd % n == 0]
            nearest = sorted(sorted(sizes, key=lambda n: abs(n - self.n_head))[:4])
            raise ValueError(
                f"model.n_embd {self.n_embd} / model.n_head {self.n_head} is no whole head_dim; "
                f"n_head could be {', '.join(map(str, nearest))}"
            )
        if self.n_global and not self.window:
            raise ValueError(f"model.n_global {self.n_global} needs a model.window to be exempt from")
        if self.n_head % self.kv_heads:
            raise ValueError(f"model.n_kv_head {self.n_kv_head} must divide model.n_head {self.n_head}")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"model.position rope needs an even head_dim; n_embd / n_head is {self.head_dim}")
        if self.previous_embedding and "ring" in self.attention.split(","):
            raise ValueError(
                "model.previous_embedding needs the token before each; on the path ring it may be elsewhere"
            )
        for path in self.attention.split(","):
            if path not in available():
                raise ValueError(f"model.attention names {path!r}; choose from: {', '.join(available())}")
        if self.n_layer % len(self.attention.split(",")):
            raise ValueError(
                f"model.attention names {len(self.attention.split(','))} paths; "
                f"their number must divide model.n_layer {self.n_layer}"
            )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def paths(self) -> tuple[str, ...]:
        """The attention path of each layer."""
        names, every = self.attention.split(","), self.full_attention_every
        is_full = [every > 0 and (layer + 1) % every == 0 for layer in range(self.n_layer)]
        return tuple("flash" if full else names[layer % len(names)] for layer, full in enumerate(is_full))

    @property
    def kv_heads(self) -> int:
        """G, the number of key-value heads."""
        return self.n_kv_head or self.n_head

    def check_memory(self) -> None:
        """ValueError when not even the parameters fit this machine, before anything is allocated: embeddings and two
        square matrices a layer, which every model has, in float32."""
        if not hasattr(os, "sysconf"):
            return
        n_rows = self.vocab_size + (self.block_size if self.position == "learned" else 0)
        needed = 4 * self.n_embd * (n_rows + 2 * self.n_layer * self.n_embd)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory:
            raise ValueError(
                f"a model of n_layer {self.n_layer}, n_embd {self.n_embd}, block_size {self.block_size} and vocab_size "
                f"{self.vocab_size} takes at least {needed >> 30:,} GiB; this machine has {memory >> 30}"
            )


@dataclass(frozen=True)
class SamplingConfig:
    """How a token is drawn. The filters apply in the order temperature, top-k, top-p, min-p."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach p (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the likeliest one's probability (Nguyen et al. 2024)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (the likeliest token) or more")
        if self.top_k < 0:
            raise ValueError(f"top-k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p is {self.top_p}; it must be above 0 and at most 1 (all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min-p is {self.min_p}; it must be from 0 (all tokens) to 1")
