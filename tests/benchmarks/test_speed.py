"""The benchmarks of training speed at tiny sizes: what they report, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import ablation, step_speed, time_to_loss
from tests.tiny import TEXT, tiny_config
from train import train

TINY = ("--train.max_steps=3", "--train.eval_tokens=100", "--train.batch_size=2", "--log.sample_tokens=0")


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def test_the_score_of_a_checkpoint_is_the_validation_loss_of_its_run(tmp_path):
    """Of code that shares nothing with training's."""
    state = train(tiny_config(tmp_path, max_steps=5, previous_embedding=True))
    assert time_to_loss.score(tmp_path / "run") == pytest.approx(state.val_loss, rel=1e-5)


def test_time_to_loss_reports_both_or_refuses(text, capsys):
    arguments = ["--source", text, "--seeds", "1", "--json", *(f"--flags={flag}" for flag in TINY)]
    assert time_to_loss.main([*arguments, "--loss", "10"]) == 0
    report = json.loads(capsys.readouterr().out)
    ours, theirs = report["rows"]
    assert "shakespeare_quick" in ours["configuration"]
    assert "nanogpt_cpu" in theirs["configuration"]
    assert report["about"]["times_sooner_seconds"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    for row in report["rows"]:
        assert 0 < row["checkpoint_seconds"] < row["seconds"]
        assert 1 < row["loss"] < 4
    assert time_to_loss.main([*arguments, "--loss", "0.5"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("not 0.5: nothing is reported\n")


def test_nothing_is_resumed_in_time_to_loss(text, tmp_path, monkeypatch, capsys):
    """Configurations of the caller's folder, of one name; seed 0, which the run that fills the cache has too."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.toml").write_text("[model]\nn_layer = 1\nn_head = 2\nn_embd = 16\n")
    flags = [f"--flags={flag}" for flag in (*TINY, "--data.tokenizer=char", "--optimizer.warmup_steps=0")]
    names = ["--source", Path(text).name, "--preset", "a/same.toml"]
    arguments = [*names, "--seeds", "0", "--loss", "10", "--json", *flags]
    assert time_to_loss.main([*arguments, "--baseline", "b/same.toml"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["loss"] == rows[1]["loss"]  # the same run from the start
    assert all(0 < row["checkpoint_seconds"] < row["seconds"] for row in rows)
    assert time_to_loss.main([*arguments, "--baseline", "a/same.toml"]) == 2
    assert "two are needed to compare" in capsys.readouterr().err


def test_an_ablation_changes_one_thing_at_a_time(text, capsys):
    options = ablation.Benchmark()
    flags = ablation.variants(options)
    assert flags["preset", "without RoPE"] == ["--model.position=learned"]
    assert flags["preset", "with logit softcap 15"] == ["--model.logit_softcap=15"]
    of_char = ablation.variants(ablation.Benchmark(preset="configs/shakespeare_char.toml"))
    assert of_char["preset", "without zero outputs"] == ["--model.zero_outputs=False"]
    assert flags["preset", "with zero outputs"] == ["--model.zero_outputs=True"]
    plain = flags["plain", ""]
    assert {flag.partition("=")[0] for flag in flags["plain", "with RoPE"][len(plain) :]} == {"--model.position"}
    assert ablation.main(["--source", text, "--steps=2", "--seeds", "1", "2", "--only", "RoPE", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["start"], row["change"]) for row in rows] == [
        ("preset", ""),
        ("preset", "without RoPE"),
        ("plain", ""),
        ("plain", "with RoPE"),
    ]
    assert [row["difference"] for row in rows] == [
        pytest.approx(row["loss"] - rows[place]["loss"]) for place, row in zip((0, 0, 2, 2), rows, strict=True)
    ]


SMALL = ("--layers=2", "--heads=2", "--width=16", "--block=8", "--batch=4", "--steps=1")


def test_step_speed_reports_both(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.step_speed.in_own_process", lambda function, *arguments: function(*arguments))
    assert step_speed.main([*SMALL, "--json", "--micro_batch=2"]) == 0
    report = json.loads(capsys.readouterr().out)
    theirs, ours = report["rows"]
    assert ours["tokens_per_second"] == pytest.approx(4 * 8 / ours["step_seconds"])
    assert ours["times_as_fast"] == pytest.approx(theirs["step_seconds"] / ours["step_seconds"])
    about = report["about"]
    assert about["parameters"] == 65 * 16 + 8 * 16 + 2 * (12 * 16**2 + 2 * 16) + 16
    assert about["share_of_it"] == pytest.approx(ours["gflops"] / about["matrix_product_gflops"])
    assert about["logging_share_of_31_ms"] == pytest.approx(about["logging_microseconds_a_step"] / 31_000)


def test_a_step_that_computes_something_else_is_refused(monkeypatch, capsys):
    """nanoGPT's loss with the same weights is ours."""
    assert step_speed.difference(step_speed.Benchmark(layers=2, heads=2, width=16, block=8)) < 1e-6
    right = step_speed.NanoGPT.forward
    monkeypatch.setattr(step_speed.NanoGPT, "forward", lambda self, x: right(self, x) + torch.arange(65) / 100)
    assert step_speed.main([*SMALL]) == 1
    assert capsys.readouterr().err.startswith("the losses differ by")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--batch=0", "must be at least 1"),
        ("--steps=0", "must be at least 1"),
        ("--micro_batch=-1", "0 (all of a batch) or more"),
        ("--micro_batch=3", "--micro-batch 3 does not divide --batch 4"),
        ("--heads=3", "n_embd"),
    ],
)
def test_mistakes_in_step_speed_are_one_line(wrong, message, capsys):
    assert step_speed.main([*SMALL, wrong]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_another_attention_is_another_model(capsys):
    assert step_speed.main([*SMALL, "--attention=linear"]) == 1
    assert "nothing is reported" in capsys.readouterr().err
