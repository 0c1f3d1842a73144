"""Order: attention itself has none, so positions are added to the embedding or turned into the queries and keys."""

import torch
from torch import Tensor


def sinusoidal(positions: Tensor, n_embd: int) -> Tensor:
    """(T,) positions -> (T, C) float32: sines in the even channels, cosines in the odd ones, wavelengths from 2π to
    10000·2π (Vaswani et al. 2017, section 3.5)."""
    channels = torch.arange(0, n_embd, 2, device=positions.device)
    angles = positions[:, None] * 10000.0 ** (-channels / n_embd)  # (T, ceil(C / 2))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :n_embd]


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary position (Su et al. 2021): x (B, H, T, D) with each pair of channels (d, d + D/2) turned by the angle
    position · base^(-2d/D), so that q·k depends on the distance of their positions only. Computed in at least float32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return turn(x.to(dtype), rotations(positions, x.shape[-1], base, dtype)).to(x.dtype)


def rotations(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(T,) positions -> what `turn` multiplies with, (T, D) each: the cosines of the angles of all pairs, twice, and
    their sines, first negated."""
    half = head_dim // 2
    frequencies = base ** (-torch.arange(half, dtype=dtype, device=positions.device) / half)
    angles = positions[:, None].to(dtype) * frequencies  # (T, D / 2)
    sin = angles.sin()
    return angles.cos().repeat(1, 2), torch.cat((-sin, sin), dim=-1)


def turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """`rotate` with the angles at hand."""
    cos, sin = turns
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
