"""What is window's own: its own rule, and what it remembers when it decodes."""

import pytest
import torch

from model.attention import build
from model.attention.mask import MaskRule
from model.attention.reference import ReferenceAttention
from model.cache import LayerCache


def inputs(n, dtype=torch.float64):
    return [torch.randn(2, heads, n, 6, dtype=dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize(("window", "n_global"), [(1, 0), (4, 0), (3, 2), (2, 5)])
def test_its_own_rule_holds_where_none_is_given(window, n_global):
    path, own = build("window", window=window, n_global=n_global), MaskRule(window=window, n_global=n_global)
    q, k, v = inputs(23)
    torch.testing.assert_close(path(q, k, v, rule=MaskRule()), ReferenceAttention()(q, k, v, rule=own))
    given = MaskRule(window=7, n_global=1)
    assert path.rule_for(given) is given
    torch.testing.assert_close(path(q, k, v, rule=given), ReferenceAttention()(q, k, v, rule=given))


@pytest.mark.parametrize(("window", "n_global"), [(1, 0), (1, 2), (2, 0), (5, 0), (5, 3), (2, 6)])
@pytest.mark.parametrize("pieces", [[1] * 60, [40] + [1] * 20, [3, 20, 1, 1, 20, 15]])
def test_decoding_keeps_the_window_and_the_globals(pieces, window, n_global):
    """Between steps no more than w - 1 + g keys, during one w + g, in memory too; far past the window."""
    path, rule = build("window", window=window, n_global=n_global), MaskRule()
    q, k, v = inputs(60)
    cache, steps, seen = LayerCache(60), [], 0
    for parts in zip(*(x.split(pieces, dim=2) for x in (q, k, v)), strict=True):
        steps.append(path.decode(*parts, rule=rule, cache=cache))
        seen += parts[0].shape[2]
        assert cache.n_seen == seen
        assert cache.n_kept == min(seen, window - 1 + n_global)
        last = range(max(n_global, seen - window + 1), seen)
        first = range(min(n_global, seen))
        assert cache.positions(q.device).tolist() == [*first, *last][: cache.n_kept]
        if seen > window - 1 + n_global:
            assert cache._buffer.shape[2] == window - 1 + n_global
            assert cache._buffer.untyped_storage().nbytes() == cache._buffer.numel() * 8
    torch.testing.assert_close(torch.cat(steps, dim=2), path(q, k, v, rule=rule), rtol=1e-12, atol=1e-12)


def test_impossible_windows_are_refused():
    with pytest.raises(ValueError, match="window is 0; it must be a whole number from 1"):
        build("window", window=0)
    with pytest.raises(ValueError, match="n_global is -1"):
        build("window", n_global=-1)
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"'window' does not support bidirectional; paths that do: .*tiled"):
        build("window")(q, q, q, rule=MaskRule(causal=False))


def test_globals_of_the_rule_join_a_window_of_the_path():
    path = build("window", window=2, n_global=1)
    assert path.rule_for(MaskRule(n_global=3)) == MaskRule(window=2, n_global=3)
    assert path.rule_for(MaskRule()) == MaskRule(window=2, n_global=1)
    assert path.rule_for(MaskRule(window=4)) == MaskRule(window=4)


@pytest.mark.parametrize("options", [{"dropout": 1.5}, {"dropout": -0.1}, {"softcap": -1.0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=r"dropout .* must be in \[0, 1\), and softcap .* 0 or more"):
        build("reference", **options)


@pytest.mark.parametrize("name", ["reference", "flash", "tiled", "window", "linear"])
def test_heads_that_do_not_divide_and_too_few_keys_are_refused(name):
    def x(heads, tokens):
        return torch.randn(1, heads, tokens, 4)

    with pytest.raises(ValueError, match=r"3 query heads on 2 key-value heads, .*: the heads must divide"):
        build(name)(x(3, 5), x(2, 5), x(2, 5), rule=MaskRule())
    with pytest.raises(ValueError, match=r"6 queries on 5 keys: .* the queries are the last"):
        build(name)(x(2, 6), x(2, 5), x(2, 5), rule=MaskRule())
