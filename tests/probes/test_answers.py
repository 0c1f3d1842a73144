"""probe.py heads, stats, rollout, compare and timeline through its main, on a run that is trained here."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from probe import main
from probes.answers import SCORES
from probes.capture import capture
from probes.record import AttentionRecord
from probes.scores import ROLES
from tests.tiny import tiny_config
from train import train
from training.checkpoint import load_run

torch.set_num_threads(1)
ODD = "a\n🙂</script>"
STATISTICS = ["entropy", "entropy_share", "distance", "sink", "confidence", "positional", "offset", "received"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("answers")
    (folder / "text.txt").write_text("to be\n🙂 or </script> not a bee\n" * 60, encoding="utf-8")
    train(
        tiny_config(folder, n_kv_head=1, max_steps=20, interval=5, block_size=32, attention="window,linear", window=9)
    )
    return str(folder / "run")


def probe(capsys, *arguments):
    """(exit code, stdout, stderr) of probe.py."""
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def table_of(capsys, *arguments):
    """`about` and `rows` of --json."""
    code, out, err = probe(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    table = json.loads(out)
    assert set(table) == {"title", "about", "rows"}
    return table["about"], table["rows"]


def test_heads(run, tmp_path, capsys):
    about, rows = table_of(capsys, "heads", run, "--sort", "induction")
    assert list(about) == ["run", "checkpoint", "step", "random_tokens", "text", "text_tokens"]
    assert (about["random_tokens"], about["text"], about["text_tokens"]) == (32, "validation", 32)
    assert sorted(row["head"] for row in rows) == ["0.0", "0.1", "1.0", "1.1"]
    assert all(list(row) == ["head", "roles", *SCORES] for row in rows)
    assert [row["induction"] for row in rows] == sorted((row["induction"] for row in rows), reverse=True)
    first, second = (next(row for row in rows if row["head"] == name) for name in ("0.1", "1.1"))
    assert first["k_composition"] is None
    assert isinstance(second["k_composition"], float)
    about, of_text = table_of(capsys, "heads", run, "--text", ODD)
    assert about["text"] == "--text"
    _, of_same_text = table_of(capsys, "stats", run, "--text", ODD)
    assert [row["entropy"] for row in of_text] == pytest.approx([row["entropy"] for row in of_same_text], abs=1e-6)
    code, out, _ = probe(capsys, "heads", run)
    assert code == 0
    assert "head  roles" in out
    assert "run/best" not in out
    moved = shutil.copytree(Path(run), tmp_path / "moved")
    source = Path(run).parent / "text.txt"
    text = source.read_bytes()
    source.unlink()
    try:
        about, rows = table_of(capsys, "heads", moved)
    finally:
        source.write_bytes(text)
    assert (about["text"], about["text_tokens"]) == ("random tokens", None)
    assert len(rows) == 4
    code, _, err = probe(capsys, "heads", run, "--draws", "0")
    assert (code, "--draws is 0; prefix matching needs at least 1" in err) == (2, True)
    assert probe(capsys, "heads", run, "--sort", "nothing")[::2] == (
        2,
        f"probe.py: there is no column 'nothing'; choose one of: head, roles, {', '.join(SCORES)}\n",
    )


@pytest.mark.parametrize("text", ["a", "a\n", ODD])
def test_stats_of_runs_and_records_agree(run, text, tmp_path, capsys):
    about, rows = table_of(capsys, "stats", run, "--text", text)
    assert about["tokens"] == len(text)
    assert list(rows[0]) == ["head", "path", "kernel", *STATISTICS]
    assert [row["path"] for row in rows] == ["window", "window", "linear", "linear"]
    record = tmp_path / "a.safetensors"
    assert probe(capsys, "capture", run, "--text", text, "-o", record)[0] == 0
    _, of_record = table_of(capsys, "stats", record)
    assert of_record == [pytest.approx(row, abs=1e-6) for row in rows]
    weights = AttentionRecord.load(record).weights(1, 1).double()
    assert rows[3]["confidence"] == pytest.approx(float(weights.amax(-1).mean()), abs=1e-5)
    assert rows[3]["entropy"] == pytest.approx(float(-weights.xlogy(weights).sum(-1).mean()), abs=1e-5)
    if len(text) == 1:
        assert rows[0]["entropy_share"] is None


def test_rollout(run, capsys):
    about, rows = table_of(capsys, "rollout", run, "--text", ODD, "--rows", "0,5", "--top", 0)
    assert list(about) == ["run", "checkpoint", "step", "tokens", "method"]
    assert list(rows[0]) == ["row", "row_token", "position", "token", "share"]
    assert (rows[0]["row"], rows[0]["position"]) == (0, 0)
    assert rows[0]["share"] == pytest.approx(1)
    assert sum(row["share"] for row in rows if row["row"] == 5) == pytest.approx(1)
    assert {row["position"]: row["token"] for row in rows if row["row"] == 5}[1] == "⏎"
    _, weighted = table_of(capsys, "rollout", run, "--text", ODD, "--norms")
    assert [row["row"] for row in weighted] == [len(ODD) - 1] * 10
    assert sum(row["share"] for row in weighted) <= 1
    assert probe(capsys, "rollout", run, "--text", ODD, "--rows", "99")[0] == 2


def test_compare(run, tmp_path, capsys):
    about, rows = table_of(capsys, "compare", run, "--steps", "5,20", "--sort", "moved")
    assert (about["first_step"], about["second_step"], about["tokens"]) == (5, 20, 32)
    keys = [key for key in SCORES if key not in ("offset", "copying") and not key.endswith("composition")]
    assert list(rows[0]) == ["head", "moved", *keys]
    assert rows[0]["moved"] >= rows[1]["moved"] > 0
    records = [AttentionRecord.load(f"{run}/records/step-{step:06d}.safetensors") for step in (5, 20)]
    for row in rows:
        a, b = (record.weights(*map(int, row["head"].split("."))).double() for record in records)
        assert row["moved"] == pytest.approx(float((a - b).abs().sum(-1).mean() / 2), abs=1e-5)
        change = float((b - a).diagonal(-15)[1:].mean())  # 16 tokens twice: rows 16 and on
        assert row["induction"] == pytest.approx(change, abs=1e-5)
    _, same = table_of(capsys, "compare", run, run, "--text", ODD)
    assert all(row["moved"] == 0 and row["entropy"] == 0 for row in same)
    about, _ = table_of(capsys, "compare", run)
    assert (about["first"], about["second"]) == (f"{run} best", f"{run} last")
    record = f"{run}/records/step-000020.safetensors"
    about, rows = table_of(capsys, "compare", record, run, "--checkpoint", "last")
    assert max(abs(row["induction"]) for row in rows) < 1e-6  # the record is of the last step and of the same tokens
    other = capture(load_run(run, "last").model, [3, 1, 2, 1])  # not the tokens that are compared by default
    other.save(tmp_path / "other.safetensors")
    about, rows = table_of(capsys, "compare", tmp_path / "other.safetensors", run, "--checkpoint", "last")
    assert about["tokens"] == 4
    assert max(row["moved"] for row in rows) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "5,7"], r"keeps no record step-000007\.safetensors; steps there: 5, 10, 15, 20"),
        (["--steps", "5"], "give two steps such as 250,500"),
        (["nowhere"], "nowhere is neither a record nor a run directory"),
    ],
)
def test_compare_refuses(run, arguments, message, capsys):
    code, _, err = probe(capsys, "compare", run, *arguments)
    assert code == 2
    assert re.search(message, err)


def test_timeline(run, tmp_path, capsys):
    about, rows = table_of(capsys, "timeline", run, "-o", tmp_path / "t.png")
    assert list(rows[0]) == ["role", "head", "formed", "peak", "at", "last"]
    assert {row["role"] for row in rows} == set(ROLES)
    assert (about["steps"], about["looks"], about["least sink"]) == ("5..20", 4, 0.3)
    with Image.open(about["output"]) as picture:
        picture.load()
        assert picture.size[0] > 1000
    nothing = "probe.py: no head scores were written in training; train with --probe.interval 250\n"
    assert probe(capsys, "timeline", tmp_path)[::2] == (2, nothing)
    (tmp_path / "probes.jsonl").write_text('{"step": 5}\n{"step": 10, "sco', encoding="utf-8")
    assert probe(capsys, "timeline", tmp_path)[::2] == (2, nothing)
    nowhere = tmp_path / "nowhere"
    assert probe(capsys, "timeline", nowhere)[::2] == (2, f"probe.py: {nowhere} is no run directory\n")
