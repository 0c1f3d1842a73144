"""Effects of interventions: losses, distributions, rank correlations and patching scores, each computed once more."""

import math

import pytest
import torch
from torch.nn import functional as F

from model.gpt import next_token_loss
from probes.causal.effects import (
    ablation_losses,
    divergence,
    edge_effects,
    knockout_change,
    patch_scores,
    rank_correlation,
)
from probes.causal.interventions import knockout
from tests.probes.small import tiny, tokens

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def loss_of(model, ids):
    """Mean loss of examples of block_size targets, each starting afresh."""
    size, losses = min(model.config.block_size, len(ids) - 1), []
    for start in range(0, len(ids) - size, size):
        logits = model(ids[None, start : start + size])[0]
        losses.append(F.cross_entropy(logits, ids[start + 1 : start + size + 1]))
    return float(torch.stack(losses).mean())


def without_columns(model, layer, heads):
    """A copy whose output matrix does not read these heads: that is what zero ablation must equal."""
    copy = tiny(**{"block_size": model.config.block_size, "n_kv_head": model.config.n_kv_head})
    for head in heads:
        copy.blocks[layer].attn.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
    return copy


@pytest.mark.parametrize("options", [{"block_size": 7}, {"block_size": 400, "n_kv_head": 2}, {"block_size": 50}])
def test_ablation_is_the_loss_of_a_model_that_does_not_read_the_head(options):
    model, ids = tiny(**options), tokens(101)
    groups = [[(0, 1)], [(1, 0)], [(1, 0), (1, 2)]]
    losses = ablation_losses(model, ids, groups)
    expected = [
        loss_of(model, ids),
        *(loss_of(without_columns(model, g[0][0], [h for _, h in g]), ids) for g in groups),
    ]
    assert losses == pytest.approx(expected, abs=1e-6)
    assert len(set(losses)) == 4


def test_parts_of_the_data_run_apart_and_give_the_same(monkeypatch):
    model, ids = tiny(block_size=5), tokens(51)
    for how in ("zero", "mean", "resample"):
        whole = ablation_losses(model, ids, [[(0, 2)], [(1, 3)]], how=how)
        monkeypatch.setattr("probes.causal.effects._TOKENS_AT_ONCE", 10)
        parts = ablation_losses(model, ids, [[(0, 2)], [(1, 3)]], how=how)
        monkeypatch.undo()
        assert parts[0] == pytest.approx(whole[0], abs=1e-6)
        # Each part resamples among its own examples.
        assert (parts[1:] == pytest.approx(whole[1:], abs=1e-6)) == (how != "resample")


def test_keeping_the_patterns_makes_no_difference_in_the_last_layer_only():
    full, kept = (ablation_losses(tiny(), tokens(60), [[(0, 1)], [(1, 1)]], keep_patterns=k) for k in (False, True))
    assert full[0] == kept[0]
    assert full[1] != pytest.approx(kept[1], abs=1e-7)
    assert full[2] == kept[2]


def test_the_shortest_texts():
    assert ablation_losses(tiny(), tokens(2), [[(0, 0)]])[1] > 0
    with pytest.raises(ValueError, match="at least two tokens; the text has 1"):
        ablation_losses(tiny(), tokens(1), [])
    with pytest.raises(ValueError, match="there is one example"):
        ablation_losses(tiny(), tokens(9), [[(0, 0)]], how="resample")
    with pytest.raises(ValueError, match="query 0 sees one key"):
        next(edge_effects(tiny(), tokens(1), 0))
    assert [len(effects.keys) for effects in edge_effects(tiny(), tokens(2), 1)] == [2] * 8


def test_a_knockout_changes_the_distribution_and_no_edge_of_the_mask_is_refused():
    model, ids = tiny(), tokens(9)
    before, after = knockout_change(model, ids, [(8, 3), (8, 2)], [0, 1])
    torch.testing.assert_close(before, model(ids[None])[0, -1].double().softmax(-1))
    assert float(before.sum()) == pytest.approx(1)
    by_hand = sum(float(p) * math.log(float(p) / float(q)) for p, q in zip(before, after, strict=True))
    assert divergence(before, after) == pytest.approx(by_hand, abs=1e-12)
    assert by_hand > 1e-9
    with pytest.raises(ValueError, match="query 2 does not see key 5"):
        knockout_change(model, ids, [(2, 5)], [0, 1])
    windowed = tiny(attention="window", window=3)
    with pytest.raises(ValueError, match="query 8 does not see key 5"):
        knockout_change(windowed, ids, [(8, 5)], [1])


@pytest.mark.parametrize("options", [{}, {"n_kv_head": 2}, {"attention": "window", "window": 4}], ids=str)
def test_effects_of_an_edge_are_those_of_knocking_it_out(options):
    """Claims 12 and 13, on a model: for every edge, weight, change of output and change of the prediction."""
    model, ids, query = tiny(**options).double(), tokens(10), 8
    clean = model(ids[None])[0, query].softmax(-1)
    seen = {}
    for effects in edge_effects(model, ids, query):
        path = model.blocks[effects.layer].attn.path
        for key, weight, output, distribution in zip(
            effects.keys.tolist(), effects.weights, effects.output, effects.distribution, strict=True
        ):
            outs = []
            handle = path.register_forward_hook(lambda _, args, out, outs=outs: outs.append((args, out)))
            model(ids[None])
            handle.remove()
            with knockout(model, [(query, key)], [effects.layer], heads=[effects.head]):
                handle = path.register_forward_hook(lambda _, args, out, outs=outs: outs.append((args, out)))
                after = model(ids[None])[0, query].softmax(-1)
                handle.remove()
            ((q, k, _), before_out), (_, after_out) = outs
            map_ = path.weights(q, k, rule=model.blocks[0].attn.rule)
            torch.testing.assert_close(weight, map_[0, effects.head, query, key])
            change = (after_out - before_out)[0, effects.head, query].norm()
            torch.testing.assert_close(output, change, atol=1e-9, rtol=1e-6)
            torch.testing.assert_close(distribution, (after - clean).abs().sum() / 2, atol=1e-12, rtol=1e-6)
            seen[effects.layer, effects.head, key] = float(distribution)
    n_keys = 4 if "window" in options else 9
    assert len(seen) == 2 * 4 * n_keys
    assert min(seen.values()) > 0  # the smallest weights too


def test_edges_run_apart_and_give_the_same(monkeypatch):
    model = tiny()
    whole = list(edge_effects(model, tokens(9), 8))
    monkeypatch.setattr("probes.causal.effects._TOKENS_AT_ONCE", 20)
    for one, other in zip(whole, edge_effects(model, tokens(9), 8), strict=True):
        torch.testing.assert_close(one.distribution, other.distribution, atol=1e-7, rtol=0)


def test_rank_correlation():
    """Spearman's rho without ties: 1 - 6 Σ d² / (n (n² - 1)); with ties, Pearson's of the mean ranks."""
    x, y = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0]), torch.tensor([10.0, 20.0, 30.0, 15.0, 99.0])
    d = [3 - 1, 1 - 3, 4 - 4, 2 - 2, 5 - 5]
    assert rank_correlation(x, y) == pytest.approx(1 - 6 * sum(e * e for e in d) / (5 * 24))
    assert rank_correlation(x, -x) == pytest.approx(-1)
    assert rank_correlation(x, x.exp()) == pytest.approx(1)
    tied = torch.tensor([1.0, 2.0, 2.0, 3.0])  # ranks 1, 2.5, 2.5, 4
    expected = torch.corrcoef(torch.tensor([[1.0, 2.5, 2.5, 4.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64))[0, 1]
    assert rank_correlation(tied, torch.arange(4.0)) == pytest.approx(float(expected))
    assert math.isnan(rank_correlation(torch.ones(3), torch.arange(3.0)))
    assert math.isnan(rank_correlation(torch.ones(1), torch.ones(1)))


def test_patching_scores():
    """The last position's stream in an attention-free last step, and every head at once, are known beforehand."""
    model, clean = tiny(), tokens(6, seed=1)
    corrupt = clean.clone()
    corrupt[2] = (corrupt[2] + 1) % 11
    patches = patch_scores(model, clean, corrupt, 3, 7)
    assert (patches.stream.shape, patches.heads.shape) == ((2, 6), (2, 4))
    # Only token 2 differs at the input, so its position alone restores everything and the others nothing.
    expected = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(patches.stream[0], expected, atol=1e-3, rtol=0)
    assert patches.stream[1, :2].abs().max() < 1e-3  # before the difference, nothing differs
    logits = [model(ids[None])[0, -1] for ids in (clean, corrupt)]
    assert [patches.clean, patches.corrupted] == pytest.approx([float(x[3] - x[7]) for x in logits], abs=1e-6)


def test_a_patched_head_is_the_clean_one_in_the_corrupted_run():
    model, clean, corrupt = tiny(), tokens(6, seed=1), tokens(6, seed=2)
    patches = patch_scores(model, clean, corrupt, 3, 7)
    kept = []
    path = model.blocks[1].attn.path
    handle = path.register_forward_hook(lambda _, __, out: kept.append(out))
    before = [model(ids[None])[0, -1] for ids in (corrupt, clean)]
    handle.remove()

    def hook(_, _args, out):
        out = out.clone()
        out[0, 2] = kept[1][0, 2]
        return out

    handle = path.register_forward_hook(hook)
    patched = model(corrupt[None])[0, -1]
    handle.remove()
    start, end, now = (float(x[3] - x[7]) for x in (*before, patched))
    assert float(patches.heads[1, 2]) == pytest.approx((now - start) / (end - start), abs=1e-3)


def test_texts_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="clean text has 5 tokens and the corrupted one 4"):
        patch_scores(tiny(), tokens(5), tokens(4), 0, 1)
    with pytest.raises(ValueError, match="same logit difference"):
        patch_scores(tiny(), tokens(5), tokens(5), 0, 1)
    nearly = tokens(5)
    model = tiny()
    with torch.no_grad():  # two tokens that differ by next to nothing
        model.token_embedding.weight[7] = model.token_embedding.weight[nearly[0]] + 1e-5
    with pytest.raises(ValueError, match="nearly the same logit difference"):
        patch_scores(model, nearly, torch.cat((torch.tensor([7]), nearly[1:])), 0, 1)
    with pytest.raises(ValueError, match="query 5 does not exist; the text has 5 tokens"):
        next(edge_effects(tiny(), tokens(5), 5))
    with pytest.raises(ValueError, match="'linear' is no softmax"):
        next(edge_effects(tiny(attention="linear"), tokens(5), 4))


def test_examples_may_be_given_and_only_some_targets_counted():
    model, examples = tiny(), torch.stack([tokens(10, seed) for seed in range(3)])
    logits = model(examples[:, :-1]).detach()
    for counted in (slice(None), slice(5, None), slice(4)):
        wanted = next_token_loss(logits[:, counted], examples[:, 1:][:, counted]).item()
        assert ablation_losses(model, examples, [], counted=counted) == [pytest.approx(wanted, rel=1e-5)]
