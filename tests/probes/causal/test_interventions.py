"""Interventions: each identity that must hold, on every path, and that nothing of them stays behind."""

import math

import pytest
import torch

from probes.causal.interventions import (
    ablate,
    knockout,
    patching,
    removing,
    replacements,
    replacing_heads,
    streams,
)
from probes.checks.path_check import layer_calls
from tests.probes.small import tiny, tokens

torch.set_num_threads(1)

SOFTMAX_PATHS = {
    "reference": {"attention": "reference", "position": "alibi", "attention_softcap": 2.0},
    "flash": {"n_kv_head": 2, "position": "rope", "qk_norm": True},
    "tiled": {"attention": "tiled", "n_kv_head": 1},
    "window": {"attention": "window", "window": 5, "n_global": 1, "n_kv_head": 2},
    "flex": {"attention": "flex", "position": "alibi", "n_kv_head": 2},
    "ring": {"attention": "ring", "attention_softcap": 2.0, "n_kv_head": 2},
    "bidirectional": {"causal": False},
}
every_path = pytest.mark.parametrize("name", SOFTMAX_PATHS)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def calls_with(model, ids, intervention):
    with intervention:
        return layer_calls(model, ids)


def logits_with(model, ids, intervention):
    with intervention:
        return model(ids)


def all_heads(layer):
    return [(layer, head) for head in range(4)]


def by_hand(call, removed):
    """Weights (B, H, T, T) and output (B, H, T, D) in float64, with -inf on the removed pairs (T, T) too."""
    q, k, v = (part.double() for part in (call.q, call.k, call.v))
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    n = q.shape[2]
    scores = q @ k.mT / math.sqrt(q.shape[3])
    if call.path.softcap:
        scores = call.path.softcap * torch.tanh(scores / call.path.softcap)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    if call.path.alibi:
        slopes = 2.0 ** (-8 * torch.arange(1, 5, dtype=torch.float64) / 4)
        scores = scores - slopes[:, None, None] * (i - j).abs()
    allowed = (i >= j) if call.rule.causal else torch.ones(n, n, dtype=torch.bool)
    if call.rule.window:
        allowed = allowed & ((i - j < call.rule.window) | (j < call.rule.n_global) | (i < call.rule.n_global))
    weights = scores.masked_fill(~allowed | removed, -math.inf).softmax(-1)
    return weights, weights @ v


def removed_pairs(n, edges):
    removed = torch.zeros(n, n, dtype=torch.bool)
    for query, key in edges:
        removed[query, key] = True
    return removed


@every_path
def test_a_knocked_out_edge_is_minus_infinity_before_the_softmax(name):
    model, ids = tiny(**SOFTMAX_PATHS[name]), tokens(12)[None]
    edges = [(11, 10), (11, 0), (7, 7), (7, 6)]
    # Each layer is compared on the q, k and v that it was called with: they feel the cut in the layer below.
    calls = calls_with(model, ids, knockout(model, edges, [0, 1]))
    for call in calls:
        _, expected = by_hand(call, removed_pairs(12, edges))
        torch.testing.assert_close(call.out.double(), expected, atol=2e-6, rtol=1e-5)
        _, whole = by_hand(call, removed_pairs(12, []))
        assert (whole - expected).abs().amax((0, 1, 3)).nonzero().flatten().tolist() == [7, 11]


@every_path
def test_one_edge_follows_the_closed_form(name):
    """out' = (out - A_ij v_j) / (1 - A_ij), with A, v and out in float64."""
    model, ids = tiny(**SOFTMAX_PATHS[name]).double(), tokens(9)[None]
    call = layer_calls(model, ids)[1]
    weights, out = by_hand(call, removed_pairs(9, []))
    (changed,) = (c for c in calls_with(model, ids, knockout(model, [(8, 6)], [1])) if c.layer == 1)
    v = call.v.repeat_interleave(4 // call.v.shape[1], dim=1)
    a = weights[:, :, 8, 6, None]
    expected = out.clone()
    expected[:, :, 8] = (out[:, :, 8] - a * v[:, :, 6]) / (1 - a)
    torch.testing.assert_close(changed.out, expected, atol=1e-9, rtol=1e-9)
    assert (changed.out - call.out)[:, :, 8].norm() > 1e-3


@every_path
def test_without_all_edges_but_its_own_a_position_keeps_its_own_value(name):
    model, ids = tiny(**SOFTMAX_PATHS[name]), tokens(8)[None]
    others = [(i, j) for i in range(8) for j in range(8) if i != j]
    for call in calls_with(model, ids, knockout(model, others, [0, 1])):
        v = call.v.repeat_interleave(4 // call.v.shape[1], dim=1)
        torch.testing.assert_close(call.out, v)


@every_path
def test_no_edge_no_change(name):
    model, ids = tiny(**SOFTMAX_PATHS[name]), tokens(8)[None]
    clean = model(ids)
    assert torch.equal(logits_with(model, ids, knockout(model, [], [0, 1])), clean)
    if model.config.causal:  # what the mask forbids was never there
        assert torch.equal(logits_with(model, ids, knockout(model, [(3, 5)], [0, 1])), clean)


def test_only_the_heads_asked_for_and_only_the_rows_of_a_batch_asked_for_lose_an_edge():
    model, ids = tiny(), tokens(6).expand(2, 6)
    clean = layer_calls(model, ids)[0].out
    changed = calls_with(model, ids, knockout(model, [(5, 1)], [0], heads=[2]))[0].out
    assert (changed != clean).any(-1).nonzero()[:, 1:].tolist() == [[2, 5], [2, 5]]
    removed = torch.zeros(2, 4, 1, 6, dtype=torch.bool)
    removed[1, 3, 0, 2] = True
    changed = calls_with(model, ids, removing(model, removed, torch.tensor([4]), [0]))[0].out
    assert (changed != clean).any(-1).nonzero().tolist() == [[1, 3, 4]]


@pytest.mark.parametrize(
    ("edges", "layers", "message"),
    [
        ([(9, 0)], [0], r"position 9 does not exist; choose 0\.\.5"),
        ([(2, 6)], [0], r"position 6 does not exist; choose 0\.\.5"),
        ([(2, -1)], [0], "position -1 does not exist"),
        ([(0, 0)], [1], "layer 1: without these edges query 0 would see no key"),
        ([(2, 0), (2, 1), (2, 2)], [0], "query 2 would see no key"),
        ([(2, 0)], [2], r"layer 2 does not exist; choose 0\.\.1"),
    ],
)
def test_edges_that_cannot_be_cut_are_refused(edges, layers, message):
    model = tiny()
    with pytest.raises(ValueError, match=message):
        logits_with(model, tokens(6)[None], knockout(model, edges, layers))
    assert hooks_of(model) == 0


def test_a_path_without_softmax_is_refused_by_name():
    model = tiny(attention="linear")
    with pytest.raises(ValueError, match="layer 1: attention path 'linear' is no softmax"):
        logits_with(model, tokens(6)[None], knockout(model, [(3, 1)], [1]))


@pytest.mark.parametrize("options", [*SOFTMAX_PATHS.values(), {"attention": "linear"}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 9])
def test_without_all_heads_a_layer_has_no_attention_output(options, n):
    model, ids = tiny(**options), tokens(n)[None]
    zero = replacements("zero", layer_calls(model, ids))
    changed = logits_with(model, ids, ablate(model, all_heads(0), zero))
    model.blocks[0].attn.o_proj.weight.zero_()
    torch.testing.assert_close(changed, model(ids))


@pytest.mark.parametrize("options", [{}, {"n_kv_head": 2}, {"attention": "linear"}], ids=str)
def test_with_frozen_maps_only_the_values_of_later_layers_change(options):
    """In the last layer there is nothing later, so both agree; below it they do not."""
    model, ids = tiny(**options), tokens(9)[None]
    clean = layer_calls(model, ids)
    zero = replacements("zero", clean)
    for layer, agree in ((0, False), (1, True)):
        full = logits_with(model, ids, ablate(model, [(layer, 2)], zero))
        frozen = logits_with(model, ids, ablate(model, [(layer, 2)], zero, frozen=clean))
        assert torch.equal(full, frozen) == agree
        assert not torch.equal(full, model(ids))
    changed = calls_with(model, ids, ablate(model, [(0, 2)], zero, frozen=clean))[1]
    weights = clean[1].path.weights(clean[1].q, clean[1].k, rule=clean[1].rule)
    v = changed.v.repeat_interleave(4 // changed.v.shape[1], dim=1)
    torch.testing.assert_close(changed.out, weights @ v)
    assert not torch.equal(changed.v, clean[1].v)


def test_mean_and_resample_by_hand():
    model = tiny()
    ids = torch.stack([tokens(5, seed=seed) for seed in range(3)])
    clean = layer_calls(model, ids)
    changed = calls_with(model, ids, ablate(model, [(1, 3)], replacements("mean", clean)))[1].out
    mean = sum(clean[1].out[b, 3, t] for b in range(3) for t in range(5)) / 15
    for b in range(3):
        for t in range(5):
            torch.testing.assert_close(changed[b, 3, t], mean)
    assert torch.equal(changed[:, :3], clean[1].out[:, :3])
    changed = calls_with(model, ids, ablate(model, [(1, 0)], replacements("resample", clean)))[1].out
    for b in range(3):
        assert torch.equal(changed[b, 0], clean[1].out[(b - 1) % 3, 0])
    with pytest.raises(ValueError, match="another example's output"):
        replacements("resample", layer_calls(model, ids[:1]))


@pytest.mark.parametrize(("head", "message"), [((0, 4), r"head 4 .*0\.\.3"), ((2, 0), r"layer 2 .*0\.\.1")])
def test_heads_that_are_not_there_are_refused(head, message):
    with pytest.raises(ValueError, match=message), ablate(tiny(), [head], {}):
        pass


def test_patching_a_run_with_itself_changes_nothing_and_with_another_everywhere_gives_the_other():
    model, clean, corrupt = tiny(), tokens(7, seed=1)[None], tokens(7, seed=2)[None]
    everywhere = torch.ones(1, 7, dtype=torch.bool)
    for layer in range(2):
        own = patching(model, layer, everywhere, streams(model, corrupt)[layer])
        assert torch.equal(logits_with(model, corrupt, own), model(corrupt))
        other = patching(model, layer, everywhere, streams(model, clean)[layer])
        assert torch.equal(logits_with(model, corrupt, other), model(clean))
    at = torch.zeros(1, 7, dtype=torch.bool)
    at[0, 4] = True
    changed = logits_with(model, corrupt, patching(model, 1, at, streams(model, clean)[1]))
    assert (changed != model(corrupt)).any(-1)[0].tolist() == [False] * 4 + [True] * 3


def test_a_row_of_a_batch_can_take_another_head():
    model, ids = tiny(), tokens(6)[None]
    values = {0: layer_calls(model, tokens(6, seed=5)[None])[0].out}
    chosen = {0: torch.eye(4, dtype=torch.bool)}
    changed = calls_with(model, ids.expand(4, 6), replacing_heads(model, chosen, values))[0].out
    clean = layer_calls(model, ids)[0].out[0]
    for b in range(4):
        for head in range(4):
            torch.testing.assert_close(changed[b, head], values[0][0, head] if b == head else clean[head])


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_an_intervention_leaves_the_model_as_it_was():
    model, ids = tiny(), tokens(6)[None]
    before, clean = model(ids), layer_calls(model, ids)
    parameters = {name: weight.clone() for name, weight in model.state_dict().items()}
    interventions = [
        lambda: ablate(model, [(0, 1)], replacements("zero", clean), frozen=clean),
        lambda: knockout(model, [(3, 1)], [0, 1]),
        lambda: patching(model, 1, torch.ones(1, 6, dtype=torch.bool), clean[0].out),
    ]
    for start in interventions:
        with start():
            assert hooks_of(model) > 0
        with pytest.raises(IndexError), start():
            model(ids + 100)  # outside the vocabulary
        assert hooks_of(model) == 0
    assert torch.equal(model(ids), before)
    assert all(torch.equal(weight, parameters[name]) for name, weight in model.state_dict().items())
