"""A record on disk: the same after loading, whole or not there, and refused in one line when damaged."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model.attention.mask import MaskRule
from model.attention.reference import ReferenceAttention
from probes.capture import capture
from probes.metadata import METADATA_KEY
from probes.record import AttentionRecord
from tests.probes.small import tiny, tokens

torch.set_num_threads(1)


def test_saved_and_loaded_is_the_same(tmp_path):
    record = capture(
        tiny(attention="reference", position="alibi", attention_softcap=2.0, n_kv_head=2),
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
    torch.testing.assert_close(loaded.weights(0, 1), path.weights(q, k, rule=rule)[0, 1], atol=1e-5, rtol=0)
    assert loaded.weights(0, 1)[20, :15].max() == 0
    assert loaded.weights(0, 1)[14, 0] > 0


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
        (lambda _t, m: m.update(step="\x1b[2J"), "a step or name that cannot be shown"),
        (lambda _t, m: m["layers"][0].update(kernel="\x1b]0;x\x07"), "a step or name that cannot be shown"),
        (lambda _t, m: m["layers"][1].update(path="\u202e"), "a step or name that cannot be shown"),
        (lambda _t, m: m.update(checkpoint_hash=None), "a step or name that cannot be shown"),
        (lambda _t, m: m["layers"][0]["rule"].update(documents=[None] * 9), "RuntimeError"),
        (lambda _t, m: m["layers"][0].update(scale="a"), "damaged"),
        (lambda _t, m: m["layers"][0].update(scale=10**400), "OverflowError"),
        (lambda _t, m: m["layers"][0].update(softcap=None), "TypeError"),
        (lambda _t, m: m["layers"][0].update(softcap=float("inf")), "no usable layers"),
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
