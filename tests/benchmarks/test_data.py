"""The benchmark of encoding on a small text: what it reports, and that it checks first."""

import json

import numpy as np
import pytest

from benchmarks.data import main, write_text
from data.tokenizer import BpeTokenizer

SMALL = ("--megabytes", "0.5", "--runs", "1")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    def call(function, *arguments, bare=False):
        del bare
        return function(*arguments)

    monkeypatch.setattr("benchmarks.data.in_own_process", call)


@pytest.mark.usefixtures("tiktoken_cache")
def test_it_reports_both_tools_and_the_loader(capsys):
    assert main([*SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    theirs, ours = report["rows"]
    assert (theirs["what"], theirs["of_tiktoken"], ours["what"]) == ("tiktoken", 1, "glassgpt")
    assert ours["of_tiktoken"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    about = report["about"]
    assert about["loader_share_of_step"] == pytest.approx(about["loader_milliseconds"] / 31)


@pytest.mark.usefixtures("tiktoken_cache")
def test_other_tokens_are_refused(monkeypatch, capsys):
    right = BpeTokenizer.encode_array
    monkeypatch.setattr(BpeTokenizer, "encode_array", lambda self, text, *a: np.roll(right(self, text, *a), 1))
    assert main(SMALL) == 1
    out, err = capsys.readouterr()
    assert (out, "are not tiktoken's: nothing is reported" in err) == ("", True)


def test_the_text_has_its_size(tmp_path):
    write_text(tmp_path / "text.txt", 300_000)
    assert 300_000 <= (tmp_path / "text.txt").stat().st_size < 310_000  # a character may be several bytes
    assert main(["--megabytes", "0"]) == 2
