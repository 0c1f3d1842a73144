"""A run that was interrupted is, bit for bit, the run that was not."""

import importlib
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.tiny import finish, start, tiny_config, tiny_flags
from train import main, train
from training.metrics import read_metrics

CLOCK = {"seconds", "tokens_per_second"}


def last(folder: Path) -> dict:
    """The training state in last.pt."""
    return torch.load(folder / "last.pt", weights_only=True)


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl without what a clock decides."""
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in read_metrics(folder)]


def assert_same_run(got: Path, expected: Path) -> None:
    """Equal in every bit, the metrics too."""
    there, here = last(expected), last(got)
    for one in (there, here):
        one.pop("seconds")
        one["config"].pop("run")
        one["config"]["train"].pop("stop_at")
    assert set(here) == set(there)
    assert _plain(here) == _plain(there)
    assert rows(got) == rows(expected)


def _plain(value: object) -> object:
    """Tensors as types and bytes, for a comparison that knows no tolerance and takes nan for nan."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return repr(value)


@pytest.fixture
def no_report(monkeypatch):
    """Saves half a second a call; the report has its own test."""
    monkeypatch.setattr(importlib.import_module("train"), "report", lambda *_: None)


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(
    ("order", "dtype", "changes"),
    [
        ("random", "float32", {}),
        ("sequential", "bfloat16", {"micro_batch_size": 2}),
        ("random", "bfloat16", {"schedule": "linear", "norm": "rmsnorm", "position": "rope"}),
        (
            "random",
            "bfloat16",
            {"name": "muon", "attention": "dense", "position": "rope", "mlp": "relu2", "qk_norm": True}
            | {"zero_outputs": True, "embedding_norm": True, "previous_embedding": True, "tied_head": False},
        ),
        ("sequential", "float32", {"micro_batch_size": 1, "attention_dropout": 0.1, "attention": "reference"}),
    ],
)
def test_20_steps_are_10_and_10_and_are_5_and_5_and_10(order, dtype, changes, tmp_path, capsys):
    changes = {"order": order, "dtype": dtype, "dropout": 0.2, **changes}
    for name, stops in {"whole": [0], "halves": [10, 0], "parts": [5, 10, 20]}.items():
        for stop in stops:
            state = train(tiny_config(tmp_path, name, stop_at=stop, **changes))
            assert state.step == (stop or 20)
    shown = capsys.readouterr().out
    assert [f"resuming {tmp_path / 'parts'} after step {n}" in shown for n in (5, 10, 15)] == [True, True, False]
    assert_same_run(tmp_path / "halves", tmp_path / "whole")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert [row["step"] for row in rows(tmp_path / "parts")] == list(range(1, 21))
    # The comparison is worth something: dropout did draw, and training did move.
    train(tiny_config(tmp_path, "still", **changes | {"dropout": 0.0, "attention_dropout": 0.0}))
    assert rows(tmp_path / "still") != rows(tmp_path / "whole")
    assert rows(tmp_path / "whole")[-1]["train_loss"] < rows(tmp_path / "whole")[0]["train_loss"] - 0.2


@pytest.mark.usefixtures("no_report")
def test_steps_after_the_checkpoint_are_run_and_written_again(tmp_path):
    """As after a power cut: metrics are ahead of the checkpoint, and their last line is cut short."""
    train(tiny_config(tmp_path, "whole"))
    train(tiny_config(tmp_path, "cut", stop_at=10))
    at_10 = (tmp_path / "cut" / "last.pt").read_bytes()
    train(tiny_config(tmp_path, "cut", stop_at=15))
    (tmp_path / "cut" / "last.pt").write_bytes(at_10)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 16, "tok')
    train(tiny_config(tmp_path, "cut"))
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert all(json.loads(line) for line in metrics.read_text().splitlines())


def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    train(tiny_config(tmp_path))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.suffix != ".png"}
    capsys.readouterr()
    state = train(tiny_config(tmp_path))
    assert state.step == 20
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.suffix != ".png"} == before
    assert "validation loss after step 20" in capsys.readouterr().out


def test_signals_end_a_process_after_a_step_with_a_checkpoint_and_lose_nothing(tmp_path):
    changes = {"dtype": "bfloat16", "dropout": 0.2, "micro_batch_size": 2}
    changes |= {"max_steps": 120, "checkpoint_interval": 1000, "eval_interval": 120}
    reached = 0
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start("train.py", *tiny_flags(tmp_path, "stopped", **changes))
        deadline = time.monotonic() + 30
        while len(rows(tmp_path / "stopped")) < reached + 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(number)
        got, out, err = finish(process, timeout=20)
        assert (got, err) == (code, "")
        content = last(tmp_path / "stopped")
        assert reached + 3 <= content["step"] < 120
        reached = content["step"]
        assert f"stopped after step {reached} of 120; the same command continues" in out
        assert not list((tmp_path / "stopped").glob("*.tmp"))
    code, out, err = finish(start("train.py", *tiny_flags(tmp_path, "stopped", **changes)))
    assert (code, err) == (0, "")
    assert f"resuming {tmp_path / 'stopped'} after step {reached}" in out
    train(tiny_config(tmp_path, "whole", **changes))
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(tiny_config(folder, max_steps=6, eval_interval=3, checkpoint_interval=3))
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of a run of 6 steps, with its text."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"n_layer": 3}, "n_layer 2 -> 3"),
        ({"n_embd": 64, "block_size": 8}, "n_embd 32 -> 64; block_size 16 -> 8"),
        ({"position": "rope"}, "position learned -> rope"),
        ({"tied_head": "False"}, "tied_head True -> False"),
        ({"attention_softcap": 5.0, "attention": "reference"}, "attention_softcap 0.0 -> 5.0"),
        ({"tokenizer": "byte"}, "tokenizer char -> byte"),
    ],
)
def test_another_model_or_tokenizer_is_refused_with_the_difference(changes, difference, folder, capsys):
    before = {path.name: path.read_bytes() for path in (folder / "run").iterdir()}
    assert main(tiny_flags(folder, max_steps=9, **changes)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert difference in err
    assert "last.pt was trained with another model" in err
    assert {path.name: path.read_bytes() for path in (folder / "run").iterdir()} == before


def test_another_alphabet_is_another_tokenizer(folder, capsys):
    (folder / "text.txt").write_text((folder / "text.txt").read_text().replace("times", "TIMES"))
    assert main(tiny_flags(folder, max_steps=9)) == 2
    assert "tokenizer char -> char (or its vocabulary)" in capsys.readouterr().err


def test_learning_rate_batch_dropout_and_path_may_change(folder, capsys):
    changes = {"learning_rate": 1e-4, "batch_size": 6, "dropout": 0.1, "attention": "reference", "schedule": "constant"}
    state = train(tiny_config(folder, max_steps=8, **changes))
    assert state.step == 8
    assert state.n_tokens == 6 * 4 * 16 + 2 * 6 * 16
    assert state.optimizer.param_groups[0]["lr"] == 1e-4
    assert state.model.config.dropout == 0.1
    assert "resuming" in capsys.readouterr().out


def test_another_text_of_the_same_alphabet_is_continued_with_a_note(folder, capsys):
    text = (folder / "text.txt").read_text()
    (folder / "text.txt").write_text(text[1000:] + text[:1000])
    assert train(tiny_config(folder, max_steps=7)).step == 7
    assert "note: the training text is not the one that this run began with" in capsys.readouterr().out


def test_a_shorter_text_that_the_loader_stood_behind_is_refused(tmp_path, capsys):
    train(tiny_config(tmp_path, "ordered", order="sequential", max_steps=40, stop_at=40))
    text = tmp_path / "text.txt"
    text.write_text(text.read_text()[:1500])
    assert main(tiny_flags(tmp_path, "ordered", order="sequential", max_steps=50)) == 2
    assert "another corpus?" in capsys.readouterr().err


def test_resume_auto_must_and_never(tmp_path, capsys):
    assert main(tiny_flags(tmp_path, max_steps=3, resume="must")) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(tiny_flags(tmp_path, max_steps=3, resume="auto")) == 0
    assert "resuming" not in capsys.readouterr().out
    assert main(tiny_flags(tmp_path, max_steps=4, resume="must")) == 0
    assert "resuming" in capsys.readouterr().out
    old = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert main(tiny_flags(tmp_path, max_steps=5, resume="never")) == 0
    out = capsys.readouterr().out
    assert "resuming" not in out
    assert f"moved the earlier {tmp_path / 'run'} to {tmp_path / 'run.old-1'}" in out
    assert {path.name: path.read_bytes() for path in (tmp_path / "run.old-1").iterdir()} == old
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("resume_", ["auto", "never"])
def test_a_refusal_leaves_an_earlier_run_where_it_is(resume_, folder, capsys):
    before = sorted(path.name for path in folder.iterdir())
    for changes in ({"block_size": 4000}, {"vocab_size": 3}, {"micro_batch_size": 3}):
        assert main(tiny_flags(folder, resume=resume_, **changes)) == 2
    assert capsys.readouterr().err.count("\n") == 3
    assert sorted(path.name for path in folder.iterdir()) == before
