"""Checks of a checkpoint: sound models pass, every planted error is caught and named."""

import math
import re

import pytest
import torch

from model import GPT, ModelConfig
from model.attention.mask import MaskRule
from model.attention.reference import ReferenceAttention
from probes.checks.check import check

torch.set_num_threads(1)


def tiny(**options):
    torch.manual_seed(3)
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 32, "vocab_size": 20}
    return GPT(ModelConfig(**{**sizes, **options}))


def results_of(model):
    tokens = torch.randint(20, (32,), generator=torch.Generator().manual_seed(0))
    return check(model, tokens)


def failures(model):
    """Name of each failing check -> what it says."""
    return {result.name: result.detail for result in results_of(model) if not result.passed}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_head": 2},
        {"n_kv_head": 1, "position": "rope", "qk_norm": True, "norm": "rmsnorm"},
        {"attention": "reference", "position": "alibi", "attention_softcap": 3.0},
        {"position": "none"},
        {"position": "none", "causal": False},
        {"position": "sinusoidal", "norm_placement": "post"},
        {"causal": False},
        {"block_size": 2},
        {"n_embd": 4},
        {"attention": "tiled"},
        {"attention": "ring"},
        {"attention": "window"},
        {"attention": "window", "window": 4, "n_global": 2},
        {"attention": "window", "window": 1},
        {"attention": "window", "window": 10_000},
        {"attention": "window", "window": 4, "full_attention_every": 2},
        {"attention": "window,linear,tiled", "window": 5},
        {"attention": "flash,flex,tiled"},
    ],
    ids=str,
)
def test_a_sound_model_passes(options):
    results = results_of(tiny(**options))
    assert [result for result in results if not result.passed] == []
    assert 8 <= len(results) <= 10
    is_measured = [result.measured is not None or result.detail.startswith("not measured: ") for result in results]
    assert all(is_measured)


def test_the_order_of_earlier_tokens_is_invisible_only_without_positions():
    changes = {}
    for position in ("none", "learned", "rope", "sinusoidal"):
        results = results_of(tiny(position=position))
        (changes[position],) = (r.measured for r in results if f"tokens ({position})" in r.name)
    assert changes["none"] < 1e-6
    assert all(changes[position] > 1e-3 for position in ("learned", "rope", "sinusoidal"))


class Planted(ReferenceAttention):
    """One error, in the forward pass alone or in everything that the path says."""

    def __init__(self, error):
        super().__init__(scale=0.125 if error == "scale" else None)
        self.error = error

    def scores(self, q, k, *, rule, rows):  # noqa: ARG002
        scores = super().scores(q, k, rule=MaskRule(causal=False), rows=rows)
        distance = rows[:, None] - torch.arange(k.shape[2])[None, :]
        allowed = {
            "future": distance >= -1,
            "past": (distance >= 1) | ((distance == 0) & (rows[:, None] == 0)),
            "window": (distance >= 0) & (distance < 5),
        }.get(self.error, distance >= 0)
        return scores.masked_fill(~allowed, -math.inf)

    def forward(self, q, k, v, *, rule):
        out = super().forward(q, k, v, rule=rule)
        return out * 1.01 if self.error == "unnormalised" else out


def with_planted(error, layer=1):
    model = tiny()
    model.blocks[layer].attn.path = Planted(error)
    return model


def test_the_plant_itself_is_sound():
    assert failures(with_planted("none")) == {}


def detail_of(failed, start):
    return next(detail for name, detail in failed.items() if name.startswith(start))


def test_a_mask_that_sees_one_token_too_far_is_named_by_layer_and_offset():
    failed = failures(with_planted("future"))
    assert detail_of(failed, "wrong pairs") == "layer 1 sees forbidden keys at offset +1 (query 0, key 1)"
    assert {"change of earlier logits when a token changes", "gradient from later tokens"} <= set(failed)
    assert detail_of(failed, "row sums from log-sum-exp").startswith("layer 1 head")


def test_a_mask_that_misses_the_token_itself_is_named_by_layer_and_offset():
    failed = failures(with_planted("past", layer=2))
    assert detail_of(failed, "wrong pairs") == "layer 2 misses allowed keys at offset +0 (query 1, key 1)"


def test_a_window_nobody_asked_for_is_named_by_layer_and_offset():
    failed = failures(with_planted("window", layer=0))
    expected = "layer 0 misses allowed keys at offset -5, -6, -7 … -47 (query 5, key 0)"
    assert detail_of(failed, "wrong pairs") == expected


def test_a_window_of_another_size_than_configured_is_named():
    model = tiny(attention="window", window=8)
    model.blocks[1].attn.rule = MaskRule(window=7)
    failed = failures(model)
    assert detail_of(failed, "wrong pairs") == "layer 1 misses allowed keys at offset -7 (query 7, key 0)"
    assert detail_of(failed, "window - reference").startswith("layer 1 ")


def test_softmax_layers_beside_a_linear_one_are_checked_too():
    model = tiny(attention="linear,reference,linear")
    model.blocks[1].attn.path = Planted("scale")
    assert detail_of(failures(model), "scale of the scores") == "layer 1 has 0.12500; expected 0.35355"
    names = {result.name for result in results_of(tiny(attention="linear"))}
    assert not any("reference" in name or "scale" in name for name in names)


def test_a_rule_handed_to_one_layer_by_mistake_is_named():
    model = tiny()
    model.blocks[2].attn.rule = MaskRule(causal=False)
    assert detail_of(failures(model), "wrong pairs").startswith(
        "layer 2 sees forbidden keys at offset +1, +2, +3 … +47"
    )


def test_a_wrong_scale_is_named_with_its_value():
    failed = failures(with_planted("scale"))
    assert detail_of(failed, "scale of the scores") == "layer 1 has 0.12500; expected 0.35355"
    assert not any(name.startswith("wrong pairs") for name in failed)


def test_rows_that_do_not_sum_to_one_are_named():
    failed = failures(with_planted("unnormalised"))
    assert re.fullmatch(r"layer 1 head \d row \d+: 1.0e-02", detail_of(failed, "row sums of the kernel"))
    assert detail_of(failed, "flash - reference").startswith("layer 1 ")


def test_a_cache_that_drops_a_key_is_caught(monkeypatch):
    from model.cache import LayerCache

    whole = LayerCache.append

    def dropping(self, k, v):
        k, v = whole(self, k, v)
        return (k[:, :, 1:], v[:, :, 1:]) if k.shape[2] == 20 else (k, v)

    monkeypatch.setattr(LayerCache, "append", dropping)
    failed = failures(tiny())
    assert detail_of(failed, "cached - uncached") == "first at position 19, after a prompt of 16"
    assert len(failed) == 1


def test_weights_that_are_not_finite_fail():
    model = tiny()
    with torch.no_grad():
        model.blocks[0].attn.v_proj.weight[0, 0] = math.nan
    assert len(failures(model)) >= 4


def test_the_model_is_left_as_it_was():
    model = tiny(dropout=0.5).train()
    assert failures(model) == {}
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="at least two tokens"):
        check(model, torch.tensor([1]))
