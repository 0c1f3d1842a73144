"""The attention record: weights rebuilt from q, k and log-sum-exp are those of an explicit softmax in float64."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from model import GPT
from model.attention.mask import MaskRule
from model.attention.reference import ReferenceAttention
from model.gpt2_weights import from_gpt2
from probes.capture import capture, check_room, estimate
from probes.record import AttentionRecord, allowed_pairs
from tests.probes.small import tiny, tokens

torch.set_num_threads(1)

VARIANTS = {
    "learned": {},
    "grouped": {"n_kv_head": 2},
    "one key head": {"n_kv_head": 1, "position": "rope"},
    "rope and qk-norm": {"position": "rope", "qk_norm": True},
    "alibi": {"position": "alibi", "attention": "reference"},
    "softcap": {"attention_softcap": 2.0, "attention": "reference", "position": "alibi", "n_kv_head": 2},
    "bidirectional": {"causal": False},
}


def explicit_maps(model, ids, layer):
    """(H, T, T) float64, from the hidden state that enters the layer, by the textbook formulas."""
    seen = {}
    handle = model.blocks[layer].attn.path.register_forward_hook(
        lambda _m, args, _out: seen.update(q=args[0], k=args[1])
    )
    with torch.no_grad():
        model(ids[None])
    handle.remove()
    q, k = seen["q"][0].double(), seen["k"][0].double()
    n_head, n, dim = q.shape
    maps = torch.zeros(n_head, n, n, dtype=torch.float64)
    for h in range(n_head):
        scores = q[h] @ k[h * k.shape[0] // n_head].T / math.sqrt(dim)
        if model.config.attention_softcap:
            scores = model.config.attention_softcap * torch.tanh(scores / model.config.attention_softcap)
        if model.config.position == "alibi":
            i = torch.arange(n)
            scores = scores - 2.0 ** (-8 * (h + 1) / n_head) * (i[:, None] - i[None, :]).abs()
        if model.config.causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        maps[h] = scores.softmax(-1)
    return maps


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("n", [1, 2, 63, 300])
def test_maps_are_those_of_an_explicit_softmax(name, n):
    model = tiny(**VARIANTS[name])
    record = capture(model, tokens(n))
    assert (record.layers, record.n_head, record.n_tokens, record.head_dim) == ((0, 1), 4, n, 8)
    for layer in record.layers:
        expected = explicit_maps(model, tokens(n), layer)
        for head in range(4):
            torch.testing.assert_close(record.weights(layer, head).double(), expected[head], atol=1e-5, rtol=0)
    if n > 2:
        assert expected.max(-1).values.mean() > 3 / n  # the maps are not the uniform ones that any error would give


def test_a_block_is_a_part_of_the_map_and_zero_where_forbidden():
    record = capture(tiny(), tokens(300))
    whole = record.weights(1, 2)
    part = record.block(1, 2, slice(250, 290), slice(200, 300))
    torch.testing.assert_close(part, whole[250:290, 200:300], atol=1e-6, rtol=0)
    assert part.dtype == torch.float32
    assert (part[torch.arange(40)[:, None] + 50 < torch.arange(100)[None, :]] == 0).all()
    torch.testing.assert_close(record.row(1, 2, 299), whole[299], atol=1e-6, rtol=0)
    assert record.block(1, 2, slice(5, 5), slice(0, 9)).shape == (0, 9)
    with pytest.raises(ValueError, match="step 1"):
        record.block(1, 2, slice(0, 9, 2), slice(0, 9))


@pytest.mark.parametrize("n_cells", [1, 7, 100, 299, 300, 1000])
def test_pooling_keeps_the_largest_weight_of_each_cell(n_cells):
    record = capture(tiny(), tokens(300))
    whole, stride = record.weights(0, 1), -(-300 // n_cells)
    pooled = record.pooled(0, 1, n_cells)
    assert len(pooled) == -(-300 // stride)
    for a in range(0, len(pooled), 5):
        for b in range(0, len(pooled), 5):
            cell = whole[a * stride : (a + 1) * stride, b * stride : (b + 1) * stride]
            if b * stride > min(300, (a + 1) * stride) - 1:
                assert pooled[a, b].isnan()
            else:
                assert pooled[a, b] == pytest.approx(float(cell.max()), abs=1e-6)


def test_bfloat16_keeps_what_the_kernel_saw():
    model = tiny()
    record = capture(model, tokens(100), dtype="bfloat16")
    assert record.info.dtype == "bfloat16"
    assert record.tensor(0, "q").dtype == torch.bfloat16
    assert record.tensor(0, "lse").dtype == torch.float32
    torch.testing.assert_close(record.weights(1, 0), capture(model, tokens(100)).weights(1, 0), atol=0.05, rtol=0)


def test_capture_leaves_the_model_as_it_was():
    model = tiny(dropout=0.5, attention_dropout=0.5).train()
    before = capture(model, tokens(20)).weights(1, 1)
    assert model.training
    assert torch.equal(before, capture(model, tokens(20)).weights(1, 1))  # no dropout while it looks
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match=r"choose 0\.\.1"):
        capture(model, tokens(20), layers=[0, 99])


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "empty"), ([0] * 401, "401 tokens.*400"), ([3, 11], "id 11 .*0..10"), ([-1], "id -1 ")],
)
def test_bad_tokens_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        capture(tiny(), torch.tensor(ids, dtype=torch.int64))


class Broken(ReferenceAttention):
    """A path with one planted error."""

    def __init__(self, error, **options):
        super().__init__(**options)
        self.error = error

    def log_sum_exp(self, q, k, *, rule):
        lse = super().log_sum_exp(q, k, rule=MaskRule(causal=False) if self.error == "mask" else rule)
        return lse / math.log(2) if self.error == "base 2" else lse

    def forward(self, q, k, v, *, rule):
        return super().forward(q * (2 if self.error == "scale" else 1), k, v, rule=rule)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("base 2", r"layer 1 head \d row \d+: the weights sum to"),
        ("mask", r"layer 1 head \d row \d+: the weights sum to"),
        ("scale", r"layer 1 head \d row \d+: the recorded weights give an output"),
    ],
)
def test_capture_fails_loudly_on_a_wrong_kernel(error, message):
    model = tiny()
    model.blocks[1].attn.path = Broken(error)
    with pytest.raises(ValueError, match=message):
        capture(model, tokens(50))


def test_a_record_of_keys_before_their_rotation_is_refused(tmp_path):
    record = capture(tiny(position="rope"), tokens(50))
    record.save(tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    tensors["layers.0.k"] = tensors["layers.0.k"].roll(1, dims=-1)
    with pytest.raises(ValueError, match="layer 0 head 2 row"):
        AttentionRecord(record.info, tensors).weights(0, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "n_global"), [(None, 0), (1, 0), (3, 0), (4, 2), (50, 1)])
def test_the_record_and_the_model_mean_the_same_rule(causal, window, n_global):
    rule, places = MaskRule(causal=causal, window=window, n_global=n_global), torch.arange(12)
    allowed = allowed_pairs(rule, places, places)
    assert torch.equal(allowed, rule.allowed(places, places))
    if causal and n_global == 0:  # row i sees exactly min(i + 1, w) keys
        assert allowed.sum(-1).tolist() == [min(i + 1, window or 99) for i in range(12)]


def test_the_estimate_is_close_to_the_file(tmp_path):
    model = tiny(n_kv_head=2)
    for options in ({}, {"values": True}, {"dtype": "bfloat16"}):
        record = capture(model, tokens(400), token_bytes=[b"ab"] * 400, **options)
        record.save(tmp_path / "a.safetensors")
        size = (tmp_path / "a.safetensors").stat().st_size
        assert size == pytest.approx(estimate(model.config, 400, **options), rel=0.1)
    assert estimate(model.config, 400, n_layers=1) < 0.6 * estimate(model.config, 400)


def test_too_large_a_record_names_a_smaller_choice(tmp_path, monkeypatch):
    config = tiny(n_layer=8).config
    monkeypatch.setattr("probes.capture.free_memory", lambda: 3 * 10**9)
    with pytest.raises(ValueError, match=r"GB of memory; .* are free; --layers 0(,\d)* would fit"):
        check_room(config, 10**6, tmp_path, dtype="float32")
    monkeypatch.setattr("probes.capture.free_memory", lambda: 10**5)
    with pytest.raises(ValueError, match="0 bytes are free; take a shorter text"):
        check_room(config, 10**6, tmp_path, dtype="float32")
    assert check_room(config, 10, tmp_path, dtype="float32") < 10**5


@pytest.mark.parametrize("path", ["reference", "flash", "tiled"])
def test_maps_of_an_imported_gpt2_are_those_of_transformers(path):
    transformers = pytest.importorskip("transformers", reason="transformers (test extra) is not installed")
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 300, "vocab_size": 50, "initializer_range": 0.2}
    torch.manual_seed(2)
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(50, (1, 300))
    with torch.no_grad():
        wanted = theirs(ids, output_attentions=True).attentions
    config, weights = from_gpt2(theirs.state_dict(), n_head=4)
    ours = GPT(replace(config, attention=path)).eval()
    ours.load_state_dict(weights)
    record = capture(ours, ids)
    for layer, maps in enumerate(wanted):
        for head, expected in enumerate(maps[0]):
            torch.testing.assert_close(record.weights(layer, head), expected, rtol=0, atol=1e-5)
            rows = record.statistics(layer, head)
            torch.testing.assert_close(rows.entropy, torch.special.entr(expected).sum(-1), rtol=0, atol=1e-4)
        assert maps.std() > 0.01  # far from uniform


def test_a_capture_ends_with_the_last_layer_that_it_keeps():
    model, ran = tiny(), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    capture(model, tokens(9), layers=[0])
    assert "blocks.0.attn.path" in ran
    assert not [name for name in ran if name.startswith(("blocks.0.mlp", "blocks.1", "lm_head"))]


def test_maps_are_those_of_transformer_lens():
    pytest.importorskip("transformer_lens", reason="TransformerLens (benchmark extra) is not installed")
    from benchmarks.probes import Benchmark, error_of

    assert error_of(replace(Benchmark(), layers=2, heads=4, width=32, vocabulary=50), "TransformerLens") < 2e-5
