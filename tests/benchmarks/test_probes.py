"""The benchmark of the probes at tiny sizes: what it reports, and that it checks first."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.probes import MODULES, Benchmark, error_of, explicit, main
from probes.record import AttentionRecord

pytest.importorskip("transformers", reason="transformers (test extra) is not installed")
TINY = ("--layers=2", "--heads=2", "--width=16", "--vocabulary=50", "--long=0")


def test_it_reports_every_tool_and_the_long_capture(monkeypatch, capsys):
    """Here in one process, which is quicker; tests of benchmarks/attention.py have processes of their own."""
    monkeypatch.setattr("benchmarks.probes.in_own_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setitem(sys.modules, "transformer_lens", None)
    monkeypatch.setattr("benchmarks.probes.MODULES", {name: MODULES[name] for name in ("glassgpt", "transformers")})
    threads = torch.get_num_threads()
    try:
        assert main([*TINY, "--json", "--sizes", "64", "128", "--long", "512"]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(capsys.readouterr().out)
    assert [(row["tokens"], row["tool"]) for row in report["rows"]] == [
        (n, tool) for n in (64, 128) for tool in ("glassgpt", "transformers")
    ]
    for row in report["rows"]:
        assert 0 < row["seconds"] < 10
        assert row["megabytes"] > 0
    assert [row["times_as_long"] for row in report["rows"]][::2] == [1, 1]
    about = report["about"]
    assert (about["layers"], about["long_tokens"], about["not_installed"]) == (2, 512, [])
    assert 0 < about["long_block_milliseconds"] < 1000
    assert about["long_maps_would_be_megabytes"] == pytest.approx(36 * 512**2 * 4 / 1e6)


def test_a_wrong_result_is_refused(monkeypatch, capsys):
    right = AttentionRecord.weights
    monkeypatch.setattr(AttentionRecord, "weights", lambda self, layer, head: right(self, layer, head) + 1e-3)
    assert main([*TINY, "--sizes", "64"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("glassgpt is wrong by 1.0e-03 (at most 0.0001): nothing is reported")


def test_maps_and_statistics_agree():
    options = replace(Benchmark(), layers=2, heads=4, width=32, vocabulary=50)
    assert error_of(options, "glassgpt") < 2e-5


def test_explicit_statistics():
    uniform = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    entropy, distance, sink, confidence = explicit(uniform).tolist()
    assert entropy == pytest.approx(sum(torch.arange(1.0, 5).log().tolist()) / 4)
    assert distance == pytest.approx((0 + 0.5 + 1 + 1.5) / 4)
    assert sink == confidence == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "0"], "--sizes and --repeats must be at least 1"),
        (["--width", "10", "--heads", "3"], "--heads must divide"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
