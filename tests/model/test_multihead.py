"""MultiHeadAttention around its path: what a hook sees, grouped heads, autocast. (Its sum: test_claims.py, claim 8.)"""

import pytest
import torch

from model import GPT, ModelConfig
from model.multihead import MultiHeadAttention
from model.position import rotate


def attention_of(**options):
    sizes = {"n_head": 4, "n_embd": 16, "attention": "reference"}
    attention = MultiHeadAttention(ModelConfig(**{**sizes, **options}), 0).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention, torch.randn(2, 7, 16, dtype=torch.float64)


def seen_by_hook(attention, x):
    calls = []
    handle = attention.path.register_forward_hook(
        lambda _, args, kwargs, out: calls.append((args, kwargs, out)), with_kwargs=True
    )
    out = attention(x, positions=torch.arange(x.shape[1]))
    handle.remove()
    ((args, kwargs, per_head),) = calls
    return args, kwargs, per_head, out


def test_a_hook_sees_what_the_kernel_sees():
    """q and k after QK-norm and RoPE, in this order; the output per head, of which the layer's is a projection."""
    attention, x = attention_of(qk_norm=True, position="rope", n_kv_head=2)
    (q, k, v), kwargs, per_head, out = seen_by_hook(attention, x)
    for got, projection, n_head in ((q, attention.q_proj, 4), (k, attention.k_proj, 2)):
        plain = (x @ projection.weight.T).view(2, 7, n_head, 4).transpose(1, 2)
        unit = plain / (plain.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(got, rotate(unit, torch.arange(7), 10000.0))
    torch.testing.assert_close(v, (x @ attention.v_proj.weight.T).view(2, 7, 2, 4).transpose(1, 2))
    assert kwargs["rule"] is attention.rule
    assert per_head.shape == (2, 4, 7, 4)
    torch.testing.assert_close(out, per_head.transpose(1, 2).reshape(2, 7, 16) @ attention.o_proj.weight.T)


def test_a_hook_also_sees_decoding():
    """One call a step, with one query and all the keys so far."""
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=5)).eval()
    shapes = []
    model.blocks[0].attn.path.register_forward_hook(lambda _, args, __: shapes.append([x.shape[2] for x in args]))
    cache = model.new_cache()
    for part in torch.randint(5, (1, 6)).split([4, 1, 1], dim=1):
        model(part, cache=cache)
    assert shapes == [[4, 4, 4], [1, 5, 5], [1, 6, 6]]


def test_layers_of_different_paths_follow_the_rules_that_they_can():
    """The window reaches the layers that know windows; the full ones see all."""
    config = ModelConfig(attention="window,linear", window=3, n_global=1, full_attention_every=4, vocab_size=5)
    layers = [block.attn for block in GPT(config).blocks]
    assert [attn.path.name for attn in layers] == ["window", "linear", "window", "flash"]
    assert [(attn.rule.window, attn.rule.n_global) for attn in layers] == [(3, 1), (None, 0), (3, 1), (None, 0)]
    tokens, kept = torch.randint(5, (1, 10)), []
    model = GPT(config).eval()
    cache = model.new_cache()
    for token in tokens.split(1, dim=1):
        model(token, cache=cache)
        kept.append([layer.n_kept for layer in cache.layers])
    assert kept[-1] == [3, 0, 3, 10]  # w - 1 + g, a state, w - 1 + g, everything


def test_options_reach_the_path():
    config = ModelConfig(attention="reference", attention_softcap=3.0, position="alibi", attention_dropout=0.25)
    path = MultiHeadAttention(config, 0).path
    assert (path.softcap, path.alibi, path.dropout) == (3.0, True, 0.25)
    assert MultiHeadAttention(ModelConfig(flash_kernel="math"), 0).path.pinned == "math"
    assert MultiHeadAttention(ModelConfig(attention="window"), 0).path.own_rule.window == 256


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_grouped_heads_are_full_heads_that_share_keys_and_values(n_kv_head):
    """A grouped layer equals a full one whose key and value matrices repeat each group's H/G times in a row."""
    grouped, x = attention_of(n_kv_head=n_kv_head, bias=True)
    full, _ = attention_of(bias=True)
    copies = 4 // n_kv_head
    weights = dict(grouped.state_dict())
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        groups = weights[name].unflatten(0, (n_kv_head, 4))
        weights[name] = groups.repeat_interleave(copies, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    positions = torch.arange(7)
    torch.testing.assert_close(grouped(x, positions=positions), full(x, positions=positions))


@pytest.mark.parametrize("attention", ["reference", "flash"])
def test_autocast_does_not_reach_into_the_path(attention):
    """The projections run in bfloat16; the path alone decides what it computes in, and gets one dtype for q, k, v."""
    module, x = attention_of(attention=attention, qk_norm=True, position="rope")
    module.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (q, k, v), _, per_head, out = seen_by_hook(module, x.float())
    assert {t.dtype for t in (q, k, v, per_head, out)} == {torch.bfloat16}
    exact = module.path.weights(q.double(), k.double(), rule=module.rule) @ v.double()
    assert (per_head.double() - exact).abs().max() <= 2**-7 * v.abs().max()
