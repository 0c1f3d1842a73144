"""What sample.main refuses, in one line and with code 2: wrong flags, and directories that are no runs."""

import shutil

import pytest

from sample import main
from tests.tiny import tiny_config
from train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(tiny_config(folder, max_steps=60, eval_interval=20, learning_rate=2e-2))
    return folder / "run"


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--max-new-tokens", "0"], "max-new-tokens is 0; it must be at least 1"),
        (["--n-samples", "0"], "n-samples is 0; it must be from 1 to 100000"),
        (["--n-samples", "1000000000000"], "n-samples is 1000000000000; it must be from 1 to 100000"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "inf"], "temperature is inf"),
        (["--top-k", "-1"], "top-k is -1"),
        (["--top-p", "0"], "top-p is 0.0"),
        (["--top-p", "1.1"], "top-p is 1.1"),
        (["--min-p", "-0.1"], "min-p is -0.1"),
        (["--min-p", "2"], "min-p is 2.0"),
        (["--seed", "-1"], "seed is -1"),
        (["--seed", str(2**63)], "2^63 - 1"),
        (["--unknown", "ignore"], "'error', 'skip'"),
        (["--checkpoint", "first"], "'best', 'last'"),
        (["--device", "foo"], "device foo is not on this machine"),
        (["--dtype", "float64"], "'float32', 'bfloat16', 'float16'"),
        (["--dtype", "float16", "--device", "cpu"], "dtype float16 is for cuda; on cpu choose bfloat16 or float32"),
        (["--device", "meta"], "device meta is not on this machine"),
        (["--max-new-token", "3"], "perhaps you meant --max-new-tokens"),
        (["--top-k", "1.5"], "1.5"),
        (["another"], "another"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(flags, fragment, run, capsys):
    assert main([str(run), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sample.py: ")
    assert err.count("\n") == 1
    assert fragment in err


def test_a_directory_that_is_no_run_is_one_line_and_code_2(tmp_path, capsys, run):
    for directory, fragment in (
        (tmp_path / "nowhere", "no run directory"),
        (tmp_path, "holds no checkpoint"),
        (run / "best.pt", "no run directory"),
    ):
        assert main([str(directory)]) == 2
        err = capsys.readouterr().err
        assert fragment in err
        assert err.count("\n") == 1


def test_a_damaged_run_is_named(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "best.pt").write_bytes(b"")
    assert main([str(copy), "--max-new-tokens", "2"]) == 0
    err = capsys.readouterr().err
    assert "best.pt is damaged" in err
    assert "taking last.pt of step 60" in err
    for name in ("last.pt", "previous.pt"):
        (copy / name).write_bytes(b"")
    assert main([str(copy)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(f"{name}.pt is damaged" in err for name in ("best", "last", "previous"))
