"""What a page says of a record and of a run, against values worked out here."""

import json

import pytest
import torch

from probes.capture import capture
from probes.pictures.labels import label
from tests.probes.small import tiny, tokens
from viewer.content import View, page_content, predictions, read_ablation, view_of_model


class Letters:
    """A vocabulary of ten letters; the model's eleventh row only pads."""

    vocab_size = 10

    def token_bytes(self, token):
        return b" bcdefg\nij"[token : token + 1]


def test_the_content_is_what_the_record_says():
    record = capture(tiny(attention="tiled", window=9, n_global=2, position="alibi"), tokens(30), step=3)
    content = page_content(record)
    layer = record.layer_info(1)
    assert content["layers"][1] == {
        "index": 1,
        "path": "tiled",
        "kernel": layer.kernel,
        "kind": "softmax",
        "scale": 8**-0.5,
        "softcap": 0.0,
        "alibi_slopes": layer.alibi_slopes,
        "rule": {"causal": True, "window": 9, "n_global": 2, "documents": None},
    }
    weights = record.weights(1, 3)
    assert content["scores"]["1.3"]["previous"] == pytest.approx(float(weights.diagonal(-1).mean()), rel=1e-4)
    assert content["scores"]["1.3"]["sink"] == pytest.approx(float(weights[:, 0].mean()), rel=1e-4)
    assert set(content["score_names"]) == set(content["scores"]["0.0"])
    json.dumps(content, allow_nan=False)
    assert page_content(record, scores={"0.0": {"induction": float("nan"), "sink": 0.5}})["scores"] == {
        "0.0": {"sink": 0.5}
    }
    assert page_content(record, scores={"0.0": {"sink": 0.5}, "9.9": {}})["roles"] == {"0.0": "sink 0.50"}


def test_an_ablation_of_another_step_or_a_damaged_one_is_not_shown(tmp_path):
    rows = [{"head": "0.1", "loss": 2.5, "change": 0.5}, {"head": "together", "loss": 4.0, "change": 2.0}]
    about = {"step": 7, "how": "mean", "tokens": 100, "loss": 2.0}
    file = tmp_path / "ablation.json"
    file.write_text(json.dumps({"about": about, "rows": rows}))
    assert read_ablation(tmp_path, 7) == {"how": "mean", "tokens": 100, "loss": 2.0, "change": {"0.1": 0.5}}
    assert read_ablation(tmp_path, 8) is None
    for damaged in ("", "[]", "{}", '{"about": {"step": 7}, "rows": []}', '{"about": 7, "rows": 3}', "\0"):
        file.write_text(damaged)
        assert read_ablation(tmp_path, 7) is None
    file.write_bytes(b"\xff")
    assert read_ablation(tmp_path, 7) is None
    assert read_ablation(tmp_path / "nowhere", 7) is None


def test_predictions_are_the_models_likeliest_next_tokens():
    model, ids = tiny(), tokens(30) % 10
    found = predictions(model, Letters(), ids.tolist())
    with torch.no_grad():
        expected = model(ids[None])[0].double().softmax(-1)
    assert len(found) == 30
    for row, probabilities in zip(found, expected, strict=True):
        order = [i for i in probabilities.argsort(descending=True).tolist() if i != 10][:5]
        assert [name for name, _ in row] == [label(Letters().token_bytes(i)) for i in order]
        assert [p for _, p in row] == pytest.approx([float(probabilities[i]) for i in order], abs=2e-6)


def test_a_run_tells_scores_predictions_and_its_ablation(tmp_path):
    about = {"step": 7, "how": "zero", "tokens": 9, "loss": 2.0}
    rows = [{"head": "0.0", "loss": 1.0, "change": -1.0}]
    (tmp_path / "ablation.json").write_text(json.dumps({"about": about, "rows": rows}))
    model = tiny()
    was = torch.random.get_rng_state()
    for n, scored in ((100, "this text and random tokens"), (20, "random tokens")):
        view = view_of_model(model, Letters(), (tokens(n) % 10).tolist(), run=tmp_path, title="run", step=7, layers=[1])
        content = view.content(7)
        assert content["scored"] == scored
        assert [layer["index"] for layer in content["layers"]] == [1]
        assert set(content["scores"]) == {f"1.{head}" for head in range(4)}
        assert {"previous", "induction", "copying", "k_composition"} <= set(content["scores"]["1.0"])
        assert content["ablation"]["change"] == {"0.0": -1.0}
        assert len(content["predictions"]) == n
        assert content["tokens"]["texts"][0] == chr(Letters().token_bytes(int(tokens(n)[0] % 10))[0])
    assert torch.equal(torch.random.get_rng_state(), was)

    view = view_of_model(model, Letters(), (tokens(100) % 10).tolist(), run=tmp_path, title="")
    sink = view.last.weights(0, 2)[:64, 0].mean()
    assert view.content(0)["scores"]["0.2"]["sink"] == pytest.approx(float(sink), rel=1e-4)


def test_a_model_too_short_for_random_copies_still_has_a_page(tmp_path):
    content = view_of_model(tiny(block_size=4), Letters(), [1, 2, 3], run=tmp_path, title="").content(0)
    assert content["scored"] == "this text"
    assert "previous" in content["scores"]["0.0"]


def test_a_long_record_opens_without_scores(monkeypatch):
    record = capture(tiny(), tokens(30))
    monkeypatch.setattr("viewer.content._MOST", 29)
    content = View.of(record).content(0)
    assert (content["scores"], content["roles"], content["score_names"]) == ({}, {}, [])
    monkeypatch.setattr("viewer.content._MOST", 30)
    assert set(View.of(record).content(0)["scores"]) == {f"{layer}.{head}" for layer in (0, 1) for head in range(4)}


def test_predictions_that_would_fill_the_memory_are_left_out(monkeypatch):
    monkeypatch.setattr("viewer.content._MOST_LOGITS", 100)
    assert predictions(tiny(), Letters(), [1] * 10) is None
    assert predictions(tiny(), Letters(), [1] * 9) is not None
