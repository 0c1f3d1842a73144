"""GPT: token embedding, blocks, final norm, head."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import build, path_class, require
from model.block import Block
from model.cache import DecodingCache
from model.config import ModelConfig
from model.dropout import Dropout
from model.norm import build_norm, rms_normalise
from model.position import sinusoidal

IGNORED = -100  # a target that no loss counts


class GPT(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V).

    B batch, T tokens, C = n_embd, V = vocab_size. Logits are float32, or float64 for a float64 model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError("model.vocab_size is 0; a GPT needs the size of its tokenizer's vocabulary")
        config.check_memory()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        if config.previous_embedding:  # its last row stands before the first token
            self.previous_embedding = nn.Embedding(config.vocab_size + 1, config.n_embd)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if config.window > 0 and not any("window" in path_class(name).supports for name in config.paths):
            require(build(config.paths[0]), {"window"})  # refuses: no layer would follow the window
        # Post-norm blocks end in a norm of their own.
        self.final_norm = build_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.token_embedding.weight
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            # 2·n_layer terms are summed in the residual stream; this keeps its variance near one (GPT-2, section 2.3).
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std = 0.0 if config.zero_outputs else 0.02 / math.sqrt(2 * config.n_layer)
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None, cache: DecodingCache | None = None) -> Tensor:
        """tokens (B, T) -> logits (B, T, V).

        positions (T,) default to the T places after those that `cache` has seen.
        ValueError when the context is longer than block_size.
        """
        n_before = 0 if cache is None else cache.n_tokens
        if n_before + tokens.shape[1] > self.config.block_size:
            raise ValueError(
                f"{n_before + tokens.shape[1]} tokens are more than model.block_size {self.config.block_size}"
            )
        if positions is None:
            positions = torch.arange(n_before, n_before + tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens, positions, cache))
        for i, block in enumerate(self.blocks):
            x = block(x, positions=positions, cache=None if cache is None else cache.layers[i])
        if cache is not None:
            cache.n_tokens += tokens.shape[1]
        return self.logits(self.final_norm(x))

    def embed(self, tokens: Tensor, positions: Tensor, cache: DecodingCache | None = None) -> Tensor:
        """What enters the first block: (B, T) at positions (T,) -> (B, T, C)."""
        x = self.token_embedding(tokens)
        if self.config.position == "learned":
            x = x + self.position_embedding(positions)
        elif self.config.position == "sinusoidal":
            x = x + sinusoidal(positions, self.config.n_embd).to(x.dtype)
        if self.config.previous_embedding:
            x = x + self.previous_embedding(self._tokens_before(tokens, cache))
        return rms_normalise(x) if self.config.embedding_norm else x

    def _tokens_before(self, tokens: Tensor, cache: DecodingCache | None) -> Tensor:
        """(B, T) -> (B, T): each position's predecessor; before the first of a context stands vocab_size."""
        first = torch.full_like(tokens[:, :1], self.config.vocab_size)
        if cache is not None:
            first, cache.last_token = first if cache.last_token is None else cache.last_token, tokens[:, -1:]
        return torch.cat((first, tokens[:, :-1]), dim=1)

    def logits(self, x: Tensor) -> Tensor:
        """Unembeds normalised positions: (B, T, C) -> (B, T, V)."""
        return self.cap(self.lm_head(x))

    def cap(self, logits: Tensor) -> Tensor:
        """In at least float32, and within the softcap."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap > 0 else logits

    def new_cache(self) -> DecodingCache:
        """An empty cache for one context of at most block_size tokens."""
        return DecodingCache(self.config.n_layer, self.config.block_size)

    def n_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the targets that are not IGNORED: logits (B, T, V), targets (B, T) -> ()."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
