"""What is tiled's own: no tensor larger than the inputs and a tile, at any block size."""

import pytest
import torch

from model.attention import build
from model.attention.mask import MaskRule
from tests.counting import largest_tensor


@pytest.mark.parametrize("rule", [MaskRule(), MaskRule(causal=False), MaskRule(window=20, n_global=3)])
@pytest.mark.parametrize("block", [3, 7, 32, 100])
def test_no_tensor_is_larger_than_the_inputs_and_a_tile(block, rule):
    """48 tokens, which 7 and 32 do not divide."""
    assert largest_tensor(build("tiled", block=block), 48, rule) <= max(48 * 4, min(block, 48) ** 2)


def test_tiles_that_the_rule_forbids_are_left_out(monkeypatch):
    """Causal: half of the square and the diagonal; with a window: as many a row as it touches."""
    seen, allowed = [], MaskRule.allowed
    monkeypatch.setattr(MaskRule, "allows_all", lambda *_: False)
    monkeypatch.setattr(MaskRule, "allowed", lambda self, at, to: seen.append(1) or allowed(self, at, to))
    q, k, v = (torch.randn(1, 1, 64, 4) for _ in range(3))
    counts = []
    for rule in (MaskRule(causal=False), MaskRule(), MaskRule(window=8), MaskRule(window=8, n_global=1)):
        seen.clear()
        build("tiled", block=8)(q, k, v, rule=rule)
        counts.append(len(seen))
    assert counts == [64, 8 * 9 // 2, 8 + 7, 8 + 7 + 6]


@pytest.mark.parametrize("name", ["tiled", "ring"])
def test_a_tile_needs_a_row(name):
    with pytest.raises(ValueError, match="block is 0; a tile needs at least 1"):
        build(name, block=0)
