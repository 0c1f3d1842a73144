"""One layer: attention moves information between positions, the MLP works within each, residuals carry both on."""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from model.cache import LayerCache
from model.config import ModelConfig
from model.dropout import Dropout
from model.multihead import MultiHeadAttention
from model.norm import build_norm


class MLP(nn.Module):
    """Feed-forward (…, C) -> (…, C), the same for every position. Hidden width 4·C; swiglu has three matrices and
    takes 8/3·C, rounded up to a multiple of 8, for about the same number of parameters (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        gated = config.mlp == "swiglu"
        hidden = -(-8 * config.n_embd // 3 // 8) * 8 if gated else 4 * config.n_embd
        self.up_proj = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.gate_proj = nn.Linear(config.n_embd, hidden, bias=config.bias) if gated else None
        self.down_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = () if self.gate_proj is None else (self.gate_proj(x),)
        return self.down_proj(self.activate(self.up_proj(x), *gate))

    def activate(self, hidden: Tensor, *gate: Tensor) -> Tensor:
        """The function between the matrices."""
        if gate:
            return F.silu(gate[0]) * hidden
        if self.kind == "relu2":
            return _SquaredReLU.apply(hidden)
        return F.gelu(hidden, approximate="none" if self.kind == "gelu_exact" else "tanh")


class _SquaredReLU(Function):
    """max(x, 0)² (So et al. 2021) in the dtype of x, where square() leaves autocast's bfloat16; back in two operations
    on a tensor of 4·C channels, where PyTorch's own take five."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (grad * positive).mul_(2)


class Block(nn.Module):
    """(B, T, C) -> (B, T, C).

    pre:  x + attention(norm(x)), then x + mlp(norm(x))     (GPT-2)
    post: norm(x + attention(x)), then norm(x + mlp(x))     (Vaswani et al. 2017)
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.is_pre_norm = config.norm_placement == "pre"
        self.attn = MultiHeadAttention(config, layer)
        self.attn_norm = build_norm(config)
        self.mlp = None if config.mlp == "none" else MLP(config)
        self.mlp_norm = None if config.mlp == "none" else build_norm(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, *, positions: Tensor, cache: LayerCache | None = None) -> Tensor:
        if self.is_pre_norm:
            x = x + self.dropout(self.attn(self.attn_norm(x), positions=positions, cache=cache))
            if self.mlp is not None and self.mlp_norm is not None:
                x = x + self.dropout(self.mlp(self.mlp_norm(x)))
            return x
        x = self.attn_norm(x + self.dropout(self.attn(x, positions=positions, cache=cache)))
        if self.mlp is not None and self.mlp_norm is not None:
            x = self.mlp_norm(x + self.dropout(self.mlp(x)))
        return x
