"""Statistics from one walk over blocks of rows are those of explicit float64 maps, for every path."""

import math
import resource

import pytest
import torch

from model.attention import available, build
from model.attention.mask import MaskRule
from probes.capture import capture
from probes.record import AttentionRecord, allowed_pairs
from probes.statistics import map_difference, received, rollout, statistics, top_keys, value_norms
from tests.probes.hand_built import identity, on_first, record_of, shifted, stripe, uniform
from tests.probes.small import tiny, tokens

torch.set_num_threads(1)

PATHS = sorted(set(available()) - {"flex"})
VARIANTS = {
    **{name: {"attention": name} for name in PATHS},
    "window of 7": {"attention": "window", "window": 7},
    "window with globals": {"attention": "window", "window": 7, "n_global": 2},
    "grouped ring": {"attention": "ring", "n_kv_head": 2, "position": "alibi"},
    "grouped linear": {"attention": "linear", "n_kv_head": 2, "position": "rope"},
    "hybrid": {"attention": "linear,flash"},
    "softcap and alibi": {"attention": "tiled", "attention_softcap": 2.0, "position": "alibi"},
    "both ways": {"attention": "reference", "causal": False, "position": "alibi"},
    "linear both ways": {"attention": "linear", "causal": False},
}


def maps_of(model, ids, layer):
    """(H, T, T) float64: the explicit matrix of the layer's path, on its own q and k."""
    seen = {}
    path = model.get_submodule(f"blocks.{layer}.attn.path")
    handle = path.register_forward_hook(lambda _m, args, kw, _out: seen.update(x=args[:2], **kw), with_kwargs=True)
    with torch.no_grad():
        model(ids[None])
    handle.remove()
    q, k = (part.double() for part in seen["x"])
    return path.weights(q, k, rule=seen["rule"])[0]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("n", [1, 2, 300])
def test_statistics_are_those_of_explicit_maps(name, n, tmp_path):
    model = tiny(**VARIANTS[name])
    made = capture(model, tokens(n))
    made.save(tmp_path / "a.safetensors")
    record = AttentionRecord.load(tmp_path / "a.safetensors")
    i = torch.arange(n)
    for layer, head in ((0, 1), (1, 2)):
        weights = maps_of(model, tokens(n), layer)[head]
        torch.testing.assert_close(record.weights(layer, head).double(), weights, atol=1e-5, rtol=0)
        allowed = allowed_pairs(record.layer_info(layer).rule, i, i)
        found = statistics(record, layer, head, n_sink=2)
        logs = torch.where(weights > 0, weights, 1.0).log()
        expected = {
            "entropy": -(weights * logs).sum(-1),
            "reference": allowed.sum(-1).double().log(),
            "distance": (weights * (i[:, None] - i).abs()).sum(-1),
            "sink": weights[:, :2].sum(-1),
            "confidence": weights.amax(-1),
        }
        for key, value in expected.items():
            limit = 1e-3 if key == "distance" else 2e-5
            torch.testing.assert_close(getattr(found, key).double(), value, atol=limit, rtol=0, msg=key)
        assert (weights[i, i - found.offset] > weights.amax(-1) - 1e-5).all()
        means, counts = received(record, layer, head)
        assert torch.equal(counts, allowed.sum(0))
        torch.testing.assert_close(means.double(), weights.sum(0) / allowed.sum(0), atol=1e-5, rtol=0)
        assert torch.equal(record.received(layer, head), means)
        assert torch.equal(record.statistics(layer, head).entropy, found.entropy)
        top = record.top_keys(layer, head, n - 1, 5)
        assert [weight for _, weight in top] == pytest.approx(
            weights[-1][allowed[-1]].sort(descending=True).values[:5].tolist(), abs=1e-5
        )
        assert [weight for _, weight in top] == pytest.approx([float(weights[-1, j]) for j, _ in top], abs=1e-5)


@pytest.mark.parametrize("name", ["flash", "window of 7", "linear"])
def test_pooling_by_mean_counts_allowed_pairs_only(name):
    model = tiny(**VARIANTS[name])
    record, weights = capture(model, tokens(300)), maps_of(model, tokens(300), 1)[3]
    i = torch.arange(300)
    allowed = allowed_pairs(record.layer_info(1).rule, i, i)
    pooled = record.pooled(1, 3, 10, "mean")  # cells of 30
    assert pooled.shape == (10, 10)
    for a, b in ((0, 0), (4, 1), (9, 9), (3, 2), (2, 5)):
        cell = (slice(30 * a, 30 * a + 30), slice(30 * b, 30 * b + 30))
        n_allowed = int(allowed[cell].sum())
        expected = float(weights[cell].sum()) / n_allowed if n_allowed else math.nan
        assert float(pooled[a, b]) == pytest.approx(expected, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("trap", ["wrong base of lse", "mask off by one", "keys before their rotation"])
def test_each_trap_fails_loudly_on_every_path(name, trap):
    record = capture(tiny(attention=name, position="rope", **({"window": 8} if name == "window" else {})), tokens(60))
    tensors = {f"layers.1.{part}": record.tensor(1, part).clone() for part in ("q", "k", "lse")}
    layer = record.layer_info(1)
    rule = layer.rule
    if trap == "wrong base of lse":
        tensors["layers.1.lse"] /= math.log(2)
    elif trap == "mask off by one":
        rule = MaskRule(window=7 if name == "window" else 59)
    else:
        tensors["layers.1.k"] = tensors["layers.1.k"].roll(1, dims=-1)
    layer = type(layer)(**{**vars(layer), "rule": rule})
    info = type(record.info)(**{**vars(record.info), "layers": (layer,)})
    broken = AttentionRecord(info, tensors)
    for walk in (statistics, received, lambda *place: broken.pooled(*place[1:], 4)):
        with pytest.raises(ValueError, match=r"layer 1 head \d row \d+: the weights sum to"):
            _ = [walk(broken, 1, head) for head in range(4)]


def test_hand_built_rows():
    n = 20
    found = statistics(record_of(identity(n), shifted(n), uniform(n), on_first(n)), 0, 2)
    torch.testing.assert_close(found.entropy.double(), torch.arange(1, n + 1).double().log(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.entropy, found.reference, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.distance, torch.arange(n) / 2, atol=1e-5, rtol=0)
    record = record_of(identity(n), shifted(n), uniform(n), on_first(n))
    assert statistics(record, 0, 1).summary()["offset"] == 1
    assert statistics(record, 0, 1).summary()["positional"] == pytest.approx((n - 1) / n)
    assert statistics(record, 0, 3).summary()["sink"] == pytest.approx(1)
    assert statistics(record, 0, 0).summary()["entropy"] == pytest.approx(0, abs=1e-6)
    assert received(record, 0, 3)[0].tolist() == pytest.approx([1.0] + [0.0] * (n - 1), abs=1e-6)
    assert map_difference(record, record_of(*[uniform(n)] * 4), 0, 2) == pytest.approx(0, abs=1e-6)
    assert map_difference(record, record_of(*[shifted(n)] * 4), 0, 0) == pytest.approx((n - 1) / n, abs=1e-6)
    with pytest.raises(ValueError, match="the top 0"):
        top_keys(record, 0, 0, 3, 0)


def test_rollout_is_the_product_of_the_layers():
    model, ids = tiny(n_kv_head=2), tokens(300)
    record = capture(model, ids, values=True)
    product = torch.eye(300, dtype=torch.float64)
    weighted = product.clone()
    for layer in (0, 1):
        maps = maps_of(model, ids, layer)
        product = (maps.mean(0) + torch.eye(300)) / 2 @ product
        values = record.tensor(layer, "v").double()
        w_o = model.blocks[layer].attn.o_proj.weight.detach().double()
        norms = torch.stack([(values[h // 2] @ w_o[:, 8 * h : 8 * h + 8].T).norm(dim=-1) for h in range(4)])
        torch.testing.assert_close(value_norms(record, model, layer).double(), norms, atol=1e-5, rtol=0)
        total = (maps * norms[:, None]).sum(0)
        weighted = (total / total.sum(-1, keepdim=True) + torch.eye(300)) / 2 @ weighted
    rows = [0, 5, 299]
    torch.testing.assert_close(rollout(record, rows).double(), product[rows], atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout(record, rows, model=model).double(), weighted[rows], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="the text has 300"):
        rollout(record, [300])
    with pytest.raises(ValueError, match="with values"):
        rollout(capture(model, ids), [0], model=model)
    with pytest.raises(ValueError, match="all layers"):
        rollout(capture(model, ids, layers=[1]), [0])


def test_one_hop_of_a_shift_is_half_here_and_half_before():
    flow = rollout(record_of(shifted(6)), [3])
    assert flow[0].tolist() == pytest.approx([0, 0, 0.5, 0.5, 0, 0])
    assert stripe(6, 1).equal(shifted(6))


def test_a_long_record_is_read_in_bounded_memory():
    n = 16_384  # one map would be 1.07 GB
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, n, 8, generator=generator)
    window = build("window", window=64)
    lse = window.log_sum_exp(q[None], k[None], rule=MaskRule())[0]
    record = record_of(identity(2))
    layer = type(record.info.layers[0])(0, "window", "window", 8**-0.5, window.rule_for(MaskRule()))
    info = type(record.info)(**{**vars(record.info), "layers": (layer,), "token_ids": tuple(range(n))})
    long = AttentionRecord(info, {"layers.0.q": q, "layers.0.k": k, "layers.0.lse": lse})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert 0 < statistics(long, 0, 0).entropy.mean() < math.log(64)
    assert received(long, 0, 0)[1].max() == 64
    assert long.pooled(0, 0, 64).isfinite().sum() == 64 + 63
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert used < 300e6
