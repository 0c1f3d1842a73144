"""The benchmark of the attention paths at tiny sizes: what it reports, what it leaves out, and that it checks first."""

import json
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.attention import Benchmark, main, measure, why_not
from benchmarks.process import in_own_process
from benchmarks.report import exponent, fit, print_tables
from model.attention import available
from model.attention.linear import LinearAttention
from model.attention.window import WindowAttention
from tests.tiny import REPOSITORY, finish, start

SMALL = ("--heads=1", "--head-dim=8", "--window=16", "--repeat-seconds=0")


def test_it_reports_each_path_and_direction(tmp_path):
    plot = tmp_path / "plot.svg"
    command = ("benchmarks/attention.py", "--json", "-o", str(plot), "--sizes", "64", "128")
    code, out, err = finish(start(*command, *SMALL, "--paths", "reference", "linear"))
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert {name: report[name] for name in ("device", "heads", "head_dim", "window", "threads")} == {
        "device": "cpu",
        "heads": 1,
        "head_dim": 8,
        "window": 16,
        "threads": 1,
    }
    rows = report["rows"]
    kinds = [(row["path"], row["direction"]) for row in rows]
    assert kinds == [(p, d) for p in ("reference", "linear") for d in ("forward", "forward+backward")]
    for row in rows:
        assert (row["n"], row["skipped"]) == ([64, 128], "")
        assert all(0 < seconds < 10 for seconds in row["seconds"])
        assert all(0 < n_bytes < 1e8 for n_bytes in row["bytes"])
        assert row["seconds_exponent"] == pytest.approx(exponent(row["n"], row["seconds"]))
    drawn = plot.read_text(encoding="utf-8")
    assert "<svg" in drawn


def test_every_path_is_checked_and_what_a_device_cannot_do_is_said(monkeypatch, capsys):
    """flex has no backward pass on CPU. The measurement itself is replaced by a square law."""
    monkeypatch.setattr("benchmarks.attention.in_own_process", lambda *call: (call[3] ** 2 * 1e-6, call[3]))
    assert main([*SMALL, "--sizes", "64", "128", "256", "--limit-seconds", "0.08"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in available())
    assert "flex, forward+backward: the path has no backward_cpu" in out
    assert "flash, forward: n = 256 may take over 0.08 s" not in out  # 4 · 0.0164 s
    assert out.count("n^2.00") == out.count("n^1.00") == 2 * len(available()) - 1


@pytest.mark.parametrize(
    ("cls", "method", "name"), [(WindowAttention, "_blocks", "window"), (LinearAttention, "_causal", "linear")]
)
def test_a_wrong_path_is_named_and_nothing_is_reported(cls, method, name, monkeypatch, capsys):
    right = getattr(cls, method)

    def wrong(self, *args):
        result = right(self, *args)
        return (result[0] * (1 + 1e-6), result[1]) if isinstance(result, tuple) else result * (1 + 1e-6)

    monkeypatch.setattr(cls, method, wrong)
    assert main([*SMALL, "--sizes", "64"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    error = re.fullmatch(rf"path {name} is wrong by (\S+) \(at most 1e-09\): nothing is reported\n", err)
    assert error is not None
    assert float(error[1]) == pytest.approx(1e-6, rel=0.1)


def test_what_would_take_too_long_or_too_much_is_left_out():
    options = Benchmark(limit_seconds=1, limit_gigabytes=1)
    row = {"path": "flash", "direction": "forward+backward", "n": [8], "seconds": [0.2], "bytes": [2e8]}
    assert why_not(options, row, 16) == ""
    assert why_not(options, row | {"seconds": [0.3]}, 16) == "n = 16 may take over 1 s"
    assert why_not(options, row | {"bytes": [3e8]}, 16) == "n = 16 may take over 1 GB"


def test_memory_is_what_the_process_needs_beyond_the_inputs():
    """The explicit map of 1024² is 4.2 MB; softmax and mask keep it to a few of them."""
    options = Benchmark(heads=1, head_dim=8, repeat_seconds=0)
    _, n_bytes = in_own_process(measure, options, "reference", 1024, False)
    assert 2 * 4 * 1024**2 < n_bytes < 8 * 4 * 1024**2


def test_exponents():
    sizes = [100, 200, 400, 800]
    assert exponent(sizes, [3 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    assert exponent([100], [1.0]) is None
    row = {"n": sizes, "seconds": [9, 4, 8, 16], "bytes": [0.1, 1, 4, 16]}  # the smallest size does not count
    assert {key: round(value, 9) for key, value in fit(row).items() if key.endswith("exponent")} == {
        "seconds_exponent": 1.0,
        "bytes_exponent": 2.0,
    }


def test_tables_fit_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    sizes = [1024, 2048, 4096, 8192, 16384]
    values = {"n": sizes, "seconds": [12.3456] * 5, "bytes": [4.567e9] * 5, "skipped": ""}
    directions = ("forward", "forward+backward")
    print_tables([fit({"path": "reference", "direction": d, **values}) for d in directions], sizes, "about")
    out = capsys.readouterr().out
    assert "…" not in out
    assert out.count("12346") == out.count("4567") == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "64", "32"], "--sizes are (64, 32); they must be ascending"),
        (["-o", "plot.txt"], "-o plot.txt must end in .png, .svg or .pdf"),
        (["--paths", "flsh"], "no attention path 'flsh'; choose one of: "),
        (["--heds", "2"], "perhaps you meant --heads"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there(capsys):
    assert main(["--device", "cuda"]) == 2
    assert "--device cuda: PyTorch finds no CUDA on this machine" in capsys.readouterr().err


def test_it_runs_from_any_folder(tmp_path):
    """From a plain clone too: what is imported is what lies beside it."""
    script = str(REPOSITORY / "benchmarks" / "attention.py")
    done = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--limit-seconds" in done.stdout
