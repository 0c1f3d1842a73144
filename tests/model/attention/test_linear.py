"""What is linear's own: its weights against their formula, number by number, and a memory of fixed size."""

import itertools
import math

import pytest
import torch

from model import GPT, ModelConfig
from model.attention import build
from model.attention.mask import MaskRule
from model.cache import LayerCache


def softmax(x):
    return [math.exp(part) / sum(map(math.exp, x)) for part in x]


FEATURES = {
    "elu": lambda x: [part + 1 if part > 0 else math.exp(part) for part in x],
    "relu": lambda x: [max(part, 0) + 1e-3 for part in x],
    "softmax": softmax,
}


def by_hand(q, k, v, rule, features):
    """(weights, out) from φ(q)·φ(k)/z in plain Python; the queries are the last T of the S positions."""
    n_head, n_queries, n_keys = q.shape[1], q.shape[2], k.shape[2]
    weights, out = torch.zeros(*q.shape[:3], n_keys, dtype=torch.float64), torch.zeros(q.shape, dtype=torch.float64)
    for b, h, t in itertools.product(*map(range, q.shape[:3])):
        i, g = n_keys - n_queries + t, h * k.shape[1] // n_head
        query, keys = features(q[b, h, t].tolist()), [features(key) for key in k[b, g].tolist()]
        seen = range(i + 1 if rule.causal else n_keys)
        products = [sum(x * y for x, y in zip(query, keys[j], strict=True)) for j in seen]
        for j in seen:
            weights[b, h, t, j] = products[j] / sum(products)
            out[b, h, t] += weights[b, h, t, j] * v[b, g, j]
    return weights, out


@pytest.mark.parametrize("n_queries", [1, 4, 9])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature_map", FEATURES)
def test_weights_are_the_products_of_features_over_their_sum(feature_map, causal, n_queries):
    q = 2 * torch.randn(2, 4, n_queries, 6, dtype=torch.float64)
    k, v = (2 * torch.randn(2, 2, 9, 6, dtype=torch.float64) for _ in range(2))
    rule = MaskRule(causal=causal)
    weights, out = by_hand(q, k, v, rule, FEATURES[feature_map])
    for chunk in (1, 4, 64):
        path = build("linear", feature_map=feature_map, chunk=chunk)
        torch.testing.assert_close(path.weights(q, k, rule=rule), weights, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(path(q, k, v, rule=rule), out, rtol=1e-12, atol=1e-12)


def test_features_of_very_negative_numbers_are_not_zero():
    """elu(x) + 1 as written would be rounded to 0 below -17 in float32, and a row of zeros has no mean."""
    q = torch.full((1, 1, 3, 4), -30.0)
    v = torch.randn(1, 1, 3, 4)
    out = build("linear")(q, q, v, rule=MaskRule())
    torch.testing.assert_close(out, v.cumsum(2) / torch.arange(1, 4)[:, None])


def test_decoding_remembers_a_state_of_fixed_size():
    path, cache = build("linear"), LayerCache(200)
    q, k, v = (torch.randn(2, heads, 200, 6) for heads in (4, 2, 2))
    for start, stop in itertools.pairwise((0, 70, 71, 72, 150, 200)):
        path.decode(*(x[:, :, start:stop] for x in (q, k, v)), rule=MaskRule(), cache=cache)
        assert [tuple(part.shape) for part in cache.state] == [(2, 2, 6, 6), (2, 2, 6)]
        assert [part.untyped_storage().nbytes() for part in cache.state] == [2 * 2 * 6 * 6 * 4, 2 * 2 * 6 * 4]
        assert (cache.n_kept, cache._buffer) == (0, None)


def test_the_model_hands_on_the_feature_map():
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 5, "attention": "linear"}
    x = torch.randn(3, 4)
    for name, features in FEATURES.items():
        path = GPT(ModelConfig(**sizes, linear_feature_map=name)).blocks[0].attn.path
        torch.testing.assert_close(path.feature_map(x), torch.tensor([features(row) for row in x.tolist()]))


def test_what_it_lacks_is_refused():
    with pytest.raises(ValueError, match="feature_map is 'exp'; choose one of: elu, relu, softmax"):
        build("linear", feature_map="exp")
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        build("linear", chunk=0)
    with pytest.raises(ValueError, match="no softmax scale"):
        build("linear", scale=0.5)
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="no softmax: it has no log-sum-exp"):
        build("linear").log_sum_exp(q, q, rule=MaskRule())
    with pytest.raises(ValueError, match="'linear' does not support window; paths that do: "):
        build("linear")(q, q, q, rule=MaskRule(window=2))
