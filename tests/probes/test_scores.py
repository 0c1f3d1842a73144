"""A hand-built map scores 1 in its own role and near 0 elsewhere; scores of parameters are those of full matrices."""

import math

import pytest
import torch

from model import ModelConfig
from probes.capture import capture
from probes.scores import (
    ROLES,
    HeadName,
    composition,
    period_of,
    repeated_tokens,
    roles,
    score_heads,
    score_parameters,
    score_record,
)
from tests.probes.hand_built import identity, on_first, record_of, shifted, stripe, uniform
from tests.probes.small import tiny, tokens

torch.set_num_threads(1)

PERIOD = 40
MAPS = {
    "identity": identity(2 * PERIOD),
    "shift": shifted(2 * PERIOD),
    "uniform": uniform(2 * PERIOD),
    "first": on_first(2 * PERIOD),
    "duplicate stripe": stripe(2 * PERIOD, PERIOD),
    "induction stripe": stripe(2 * PERIOD, PERIOD - 1),
}
OWN = {  # map: the scores that are 1; all others of PINNED are near 0
    "identity": set(),
    "shift": {"previous"},
    "uniform": {"entropy_share"},
    "first": {"sink", "received"},
    "duplicate stripe": {"duplicate"},
    "induction stripe": {"induction", "prefix"},
}
PINNED = ("previous", "duplicate", "induction", "prefix", "sink", "entropy_share")
NAMED = {
    "shift": "previous token",
    "uniform": "uniform",
    "first": "sink",
    "duplicate stripe": "duplicate token",
    "induction stripe": "induction",
}


@pytest.fixture(scope="module")
def scores():
    record = record_of(*MAPS.values(), token_ids=list(range(PERIOD)) * 2)
    return dict(zip(MAPS, score_record(record).values(), strict=True))


@pytest.mark.parametrize("name", MAPS)
def test_a_hand_built_map_scores_in_its_own_role_alone(scores, name):
    for key in PINNED:
        value = scores[name][key]
        if key in OWN[name]:
            assert value == pytest.approx(1, abs=1e-3), key
        else:
            assert value < 0.09, key  # of a uniform map of 80 rows the first column has 0.074 in the first 64
    assert NAMED.get(name, "") in roles(scores[name])
    others = {role for other, role in NAMED.items() if other != name}
    assert not any(role in roles(scores[name]) for role in others)


def test_what_is_said_of_any_map(scores):
    n = 2 * PERIOD
    assert scores["uniform"]["entropy"] == pytest.approx(sum(map(math.log, range(1, n + 1))) / n, rel=1e-6)
    assert scores["identity"]["confidence"] == pytest.approx(1)
    assert scores["identity"]["positional"] == 1
    assert (scores["shift"]["offset"], scores["shift"]["positional"]) == (1, pytest.approx(1 - 1 / n))
    assert scores["first"]["distance"] == pytest.approx((n - 1) / 2, rel=1e-4)
    assert scores["first"]["received"] == pytest.approx(1)
    assert scores["identity"]["received"] == pytest.approx(2 / n, rel=0.05)


def test_prefix_matching_adds_up_all_earlier_copies():
    n, period = 20, 5
    spread = torch.zeros(n, n)
    for i in range(n):
        places = [i - r * period + 1 for r in range(1, 4) if i - r * period >= 0] or [i]
        spread[i, places] = 1 / len(places)
    found = score_record(record_of(spread, token_ids=list(range(period)) * 4))[HeadName(0, 0)]
    assert found["prefix"] == pytest.approx(1, abs=1e-5)
    assert "induction" not in found


def test_the_first_key_comes_after_no_copy():
    """Rows 9 and 14 would reach it at the offsets of two and three copies; a sink must not look like induction."""
    found = score_record(record_of(on_first(20), token_ids=list(range(5)) * 4))[HeadName(0, 0)]
    assert found["prefix"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("ids", "period"),
    [([1, 2, 1, 2], 2), ([1, 2, 3] * 2, 3), ([1, 2, 3], None), ([1, 1], None), ([1], None), ([1, 2] * 4, 2)],
)
def test_the_period_of_a_repeated_sequence(ids, period):
    assert period_of(ids) == period


@pytest.mark.parametrize("n", [1, 2])
def test_the_shortest_texts_have_scores(n):
    found = score_record(capture(tiny(), tokens(n)))[HeadName(1, 3)]
    assert math.isnan(found["previous"]) == (n == 1)
    assert 0 < found["confidence"] <= 1
    assert roles(found) is not None


def test_repeated_tokens_are_all_different_where_they_can_be():
    config = ModelConfig(block_size=200, vocab_size=70)
    twice = repeated_tokens(config, 2)
    assert len(twice) == 128
    assert twice[:64].equal(twice[64:])
    assert len(set(twice.tolist())) == 64
    assert repeated_tokens(config, 2, 5).max() < 5
    assert len(repeated_tokens(config, 4)) == 100
    assert not twice.equal(repeated_tokens(config, 2, seed=1))
    with pytest.raises(ValueError, match="block_size 7"):
        repeated_tokens(ModelConfig(block_size=7, vocab_size=70), 4)


@pytest.mark.parametrize("options", [{}, {"n_kv_head": 2}, {"norm": "rmsnorm", "tied_head": False}])
def test_scores_of_parameters_are_those_of_full_matrices(options):
    model = tiny(**options)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand_like(weight) + 0.5)
    groups = options.get("n_kv_head", 4)

    def full(layer, head):
        attn, gain = model.blocks[layer].attn, model.blocks[layer].attn_norm.weight.double()
        g = head * groups // 4
        q = attn.q_proj.weight.double()[8 * head : 8 * head + 8] * gain
        k, v = (x.weight.double()[8 * g : 8 * g + 8] * gain for x in (attn.k_proj, attn.v_proj))
        return q.T @ k, attn.o_proj.weight.double()[:, 8 * head : 8 * head + 8] @ v

    with torch.no_grad():
        found = score_parameters(model)
        qk, ov = full(1, 2)
        unembed = model.lm_head.weight.double() * model.final_norm.weight.double()
        values = torch.linalg.eigvals(unembed @ ov @ model.token_embedding.weight.double().T)
        expected = float(values.sum().real / values.abs().sum())
        assert found[HeadName(1, 2)]["copying"] == pytest.approx(expected, abs=1e-6)

        def share(second, first):
            return float((second @ first).norm() / second.norm() / first.norm())

        for kind, second in (("q", qk.T), ("k", qk), ("v", ov)):
            largest = max(share(second, full(0, head)[1]) for head in range(4))
            value = found[HeadName(1, 2)][f"{kind}_composition"]
            assert 0.1 < largest - value < 0.25  # the mean for random matrices: about 1/sqrt(32) = 0.18
        assert "k_composition" not in found[HeadName(0, 0)]


def test_composition_is_one_for_one_direction():
    a, b = torch.randn(2, 6, 1, dtype=torch.float64)
    assert composition((a, b.T), (b, a.T)) == pytest.approx(1)
    assert composition((a, b.T), (b - b, a.T)) == 0


@pytest.mark.parametrize("path", ["flash", "window", "linear", "ring"])
def test_every_head_of_a_model_has_every_score(path):
    model = tiny(attention=path, block_size=40)
    found, record = score_heads(model, n_draws=2, text=capture(model, tokens(9)))
    assert list(found) == [HeadName(layer, head) for layer in (0, 1) for head in range(4)]
    keys = {"previous", "duplicate", "induction", "prefix", "confidence", "positional", "offset", "entropy"}
    keys |= {"entropy_share", "distance", "sink", "received", "copying"}
    assert set(found[HeadName(0, 0)]) == keys
    assert set(found[HeadName(1, 0)]) == keys | {"q_composition", "k_composition", "v_composition"}
    assert {score for score, _ in ROLES.values()} <= keys
    i = torch.arange(20, 40)
    weights = record.weights(1, 1)
    assert found[HeadName(1, 1)]["induction"] == pytest.approx(float(weights[i, i - 19].mean()), abs=1e-6)
    assert found[HeadName(1, 1)]["duplicate"] == pytest.approx(float(weights[i, i - 20].mean()), abs=1e-6)
    short = capture(model, tokens(9)).weights(1, 1)
    assert found[HeadName(1, 1)]["previous"] == pytest.approx(float(short.diagonal(-1).mean()), abs=1e-6)
