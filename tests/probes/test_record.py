"""The attention record: weights rebuilt from q, k and log-sum-exp are those of an explicit softmax in float64."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model import GPT, ModelConfig
from model.attention.mask import MaskRule
from model.attention.reference import ReferenceAttention
from probes.capture import capture, check_room, estimate
from probes.metadata import METADATA_KEY
from probes.record import AttentionRecord, allowed_pairs

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


def tiny(seed=0, **options):
    """A model whose scores are far from uniform: its query and key matrices are scaled up."""
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 400, "vocab_size": 11}
    model = GPT(ModelConfig(**{**sizes, **options})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(15)
    return model


def tokens(n, seed=0):
    return torch.randint(11, (n,), generator=torch.Generator().manual_seed(seed))


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


def test_saved_and_loaded_is_the_same(tmp_path):
    record = capture(
        tiny(**VARIANTS["softcap"]),
        tokens(5),
        values=True,
        layers=[1],
        token_bytes=[b"a", b"\xe8\x8b", b"\n", b"\0", "苹".encode()],
        step=7,
        checkpoint_hash="abc",
    )
    record.save(tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    loaded = AttentionRecord.load(tmp_path / "a.safetensors")
    assert loaded.info == record.info
    assert loaded.info.token_texts == ("a", "\ufffd", "\n", "\0", "苹")
    assert loaded.info.layers[0].softcap == 2.0
    assert loaded.info.layers[0].alibi_slopes == (0.25, 0.0625, 0.015625, 0.00390625)
    assert loaded.info.layers[0].kernel == "reference"
    torch.testing.assert_close(loaded.weights(1, 3), record.weights(1, 3), atol=1e-6, rtol=0)
    assert loaded.tensor(1, "v").shape == (2, 5, 8)
    with pytest.raises(ValueError, match="layer 0 is not in this record; it has 1"):
        loaded.weights(0, 0)
    with pytest.raises(ValueError, match=r"head 4 does not exist; choose 0\.\.3"):
        loaded.weights(1, 4)


def test_documents_and_windows_survive_the_file(tmp_path):
    record = capture(tiny(attention="reference"), tokens(40))
    documents = torch.tensor([[0] * 15 + [1] * 25])
    rule = MaskRule(window=6, n_global=2, documents=documents)
    path = ReferenceAttention()
    q, k = record.tensor(0, "q")[None], record.tensor(0, "k")[None]
    layer = record.info.layers[0]
    layer = type(layer)(0, "reference", "reference", layer.scale, rule)
    info = type(record.info)(**{**vars(record.info), "layers": (layer,)})
    lse = path.log_sum_exp(q, k, rule=rule)[0]
    made = AttentionRecord(info, {"layers.0.q": q[0], "layers.0.k": k[0], "layers.0.lse": lse})
    made.save(tmp_path / "a.safetensors")
    loaded = AttentionRecord.load(tmp_path / "a.safetensors")
    torch.testing.assert_close(loaded.weights(0, 1), path.weights(q, k, rule=rule)[0, 1], atol=1e-6, rtol=0)
    assert loaded.weights(0, 1)[20, :15].max() == 0
    assert loaded.weights(0, 1)[14, 0] > 0


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


def damaged(tmp_path, change):
    record = capture(tiny(), tokens(9))
    good = tmp_path / "good.safetensors"
    record.save(good)
    bad = tmp_path / "bad.safetensors"
    if callable(change):
        with safe_open(good, framework="pt") as file:
            tensors, text = load_file(good), json.loads(file.metadata()[METADATA_KEY])
        change(tensors, text)
        save_file(tensors, bad, metadata={METADATA_KEY: json.dumps(text)})
    else:
        bad.write_bytes(change)
    return bad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (b"", "no attention record, or a damaged one"),
        (b"\xff" * 100, "no attention record, or a damaged one"),
        (b"\x02\0\0\0\0\0\0\0{}", "no attention record"),
        (lambda _t, m: m.update(format_version=2), "format version 2"),
        (lambda _t, m: m.update(lse_base="2"), "base 2"),
        (lambda _t, m: m.pop("layers"), "'layers'"),
        (lambda _t, m: m.update(layers=[]), "no usable layers"),
        (lambda _t, m: m.update(token_ids=[1]), "token ids"),
        (lambda _t, m: m.update(surprise=1), "surprise"),
        (lambda _t, m: m["layers"][0].update(scale="a"), "damaged"),
        (lambda _t, m: m["layers"][0].update(index=7), r"no tensor layers\.7"),
        (lambda _t, m: m["layers"][0]["rule"].update(window=0), "window is 0"),
        (lambda _t, m: m["layers"][0].update(alibi_slopes=[1.0]), "1 ALiBi slopes for 4 heads"),
        (lambda _t, m: m["layers"][0]["rule"].update(documents=[0, 0]), "document ids for 2 of 9"),
        (lambda t, _m: t.pop("layers.1.lse"), r"no tensor layers\.1\.lse"),
        (lambda t, _m: t.update({"layers.0.k": t["layers.0.k"][:3].contiguous()}), "layers.0: q"),
        (lambda t, _m: t.update({"layers.0.q": t["layers.0.q"].half()}), "dtypes"),
        (lambda t, _m: t.update({"layers.0.q": t["layers.0.q"][0].contiguous()}), "damaged"),
    ],
)
def test_a_damaged_record_is_one_line(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        AttentionRecord.load(damaged(tmp_path, change))
    assert "\n" not in str(caught.value)
    assert "bad.safetensors" in str(caught.value)


def test_a_truncated_record_is_refused(tmp_path):
    record = capture(tiny(), tokens(9))
    record.save(tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    for length in (4, 100, len(whole) - 1):
        (tmp_path / "b.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged"):
            AttentionRecord.load(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="no file"):
        AttentionRecord.load(tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    record = capture(tiny(), tokens(9))
    record.save(tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()

    def full(_tensors, path, metadata):  # noqa: ARG001
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("probes.record.save_file", full)
    with pytest.raises(ValueError, match=r"cannot write .*a\.safetensors: No space left"):
        record.save(tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert (tmp_path / "a.safetensors").read_bytes() == before
