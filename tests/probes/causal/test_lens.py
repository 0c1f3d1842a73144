"""Lenses: the last layer's is the model, and what the parts add to a logit sums to it."""

import pytest
import torch

from probes.causal.lens import logit_attribution, logit_lens
from tests.probes.small import tiny, tokens

torch.set_num_threads(1)

VARIANTS = {
    "layernorm": {"bias": True},
    "rmsnorm": {"norm": "rmsnorm", "position": "rope", "n_kv_head": 2},
    "attention only": {"mlp": "none", "tied_head": False},
    "linear": {"attention": "linear", "n_kv_head": 1},
}


def shaken(**options):
    """A model whose norms and biases are not their initial ones and zeros."""
    model = tiny(**options)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:
                weight.add_(torch.randn(weight.shape) * 0.3)
    return model


@pytest.mark.parametrize("options", [*VARIANTS.values(), {"norm_placement": "post", "logit_softcap": 2.0}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_lens_of_the_last_layer_is_the_model(options, n):
    model, ids = shaken(**options), tokens(n)
    lens = logit_lens(model, ids)
    assert lens.shape == (3, n, 11)
    with torch.no_grad():
        torch.testing.assert_close(lens[-1], model(ids[None])[0])
        first = model.token_embedding.weight[ids]
        if model.config.position == "learned":
            first = first + model.position_embedding.weight[:n]
        torch.testing.assert_close(lens[0], model.logits(model.final_norm(first)))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_what_the_parts_add_sums_to_the_logit_difference(name, n):
    model, ids = shaken(**VARIANTS[name]), tokens(n)
    with torch.no_grad():
        logits = model(ids[None])[0, -1]
    for target, other in ((3, 8), (5, None)):
        parts = logit_attribution(model, ids, target, other)
        expected = float(logits[target] - (0 if other is None else logits[other]))
        assert sum(parts.values()) == pytest.approx(expected, abs=1e-5)
    heads = {f"{layer}.{head}" for layer in range(2) for head in range(4)}
    mlps = set() if model.config.mlp == "none" else {"mlp 0", "mlp 1"}
    biases = {"attn bias 0", "attn bias 1", "norm bias"} if model.config.bias else set()
    assert set(parts) == {"embedding"} | heads | mlps | biases
    assert all(abs(value) > 1e-9 for value in parts.values())


def test_a_head_of_the_last_layer_adds_what_a_frozen_norm_passes_on():
    """By hand, without the norm's mean and scale: attention-only, last layer, rmsnorm of unit weight."""
    model, ids = tiny(mlp="none", norm="rmsnorm"), tokens(6)
    kept = []
    handle = model.blocks[1].attn.path.register_forward_hook(lambda _, __, out: kept.append(out[0, :, -1]))
    with torch.no_grad():
        stream = []
        other = model.final_norm.register_forward_pre_hook(lambda _, args: stream.append(args[0][0, -1]))
        model(ids[None])
        handle.remove()
        other.remove()
        scale = (stream[0].square().mean() + 1e-6).sqrt()
        weight = model.lm_head.weight
        expected = (model.blocks[1].attn.o_proj.weight[:, 16:24] @ kept[0][2]) @ (weight[4] - weight[9]) / scale
    assert logit_attribution(model, ids, 4, 9)["1.2"] == pytest.approx(float(expected), abs=1e-6)


def test_a_stream_that_is_no_sum_is_refused_and_no_hook_stays():
    with pytest.raises(ValueError, match="post-norm"):
        logit_attribution(tiny(norm_placement="post"), tokens(4), 1)
    model = tiny()
    with pytest.raises(IndexError):
        logit_attribution(model, tokens(4) + 100, 1)
    with pytest.raises(IndexError):
        logit_lens(model, tokens(4) + 100)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
