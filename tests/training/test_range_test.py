"""The range test: what it suggests, and that it leaves a run as it was."""

import json
import os
import re
import signal

import pytest
from PIL import Image

from tests.tiny import tiny_config, tiny_flags
from train import main, train
from training.range_test import HIGH, LOW, suggest


def test_the_suggestion_is_a_third_of_the_rate_of_the_lowest_loss():
    assert suggest([(0.1, 2.0, 2.0), (0.3, 1.5, 1.4), (0.9, 1.4, 1.5)]) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_it_draws_and_suggests_and_keeps_nothing(name, tmp_path, capsys):
    assert main(tiny_flags(tmp_path, find_lr=30, name=name)) == 0
    out = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"find_lr.png", "find_lr.json"}
    with Image.open(tmp_path / "run" / "find_lr.png") as picture:
        assert picture.size == (1050, 600)
    rates = [float(rate) for rate in re.findall(r"^ *(\d\.\d\de[+-]\d\d) ", out, re.MULTILINE)]
    assert rates[0] == pytest.approx(LOW * 1e-2, rel=1e-2)  # of the configured 1e-2
    assert rates == sorted(rates)
    assert rates[-1] <= HIGH * 1e-2 * 1.01
    (suggested,) = re.findall(r"suggestion: --optimizer.learning_rate (\S+)", out)
    assert LOW * 1e-2 / 3 < float(suggested) <= HIGH * 1e-2 / 3
    assert ("--optimizer.muon_learning_rate" in out) is (name == "muon")
    table = json.loads((tmp_path / "run" / "find_lr.json").read_text())
    assert table["suggestion"] == pytest.approx(float(suggested), rel=0.1)
    lowest = min(table["rows"], key=lambda row: row["smoothed"])
    assert table["suggestion"] == pytest.approx(lowest["learning_rate"] / 3)
    assert table["rows"][1]["smoothed"] == pytest.approx(
        0.8 * table["rows"][0]["loss"] + 0.2 * table["rows"][1]["loss"]
    )


def test_an_earlier_run_is_untouched_and_goes_on(tmp_path):
    train(tiny_config(tmp_path, stop_at=5))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert train(tiny_config(tmp_path, find_lr=5)).stop_signal == 0
    after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.stem != "find_lr"}
    assert after == before
    assert train(tiny_config(tmp_path)).step == 20


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_nothing_written(number, code, tmp_path, capsys, monkeypatch):
    """In the second step, which still ends; the rate is asked for each of two groups."""
    calls = []

    def rate(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return 1e-3

    monkeypatch.setattr("training.optimizer.learning_rate", rate)
    assert main(tiny_flags(tmp_path, find_lr=1000)) == code
    assert capsys.readouterr().err == "train.py: range test interrupted, nothing was written\n"
    assert len(calls) == 2 * 2
    assert list((tmp_path / "run").iterdir()) == []


def test_a_directory_that_cannot_be_is_refused_before_the_steps(tmp_path, capsys):
    (tmp_path / "run").write_text("a file")
    assert main(tiny_flags(tmp_path, find_lr=10)) == 2
    out, err = capsys.readouterr()
    assert "learning rate" not in out
    assert err.count("\n") == 1
    assert "run" in err


def test_a_range_needs_some_rates(tmp_path, capsys):
    assert main(tiny_flags(tmp_path, find_lr=4)) == 2
    assert "find_lr is 4; it must be 0 (to train) or at least 5" in capsys.readouterr().err
