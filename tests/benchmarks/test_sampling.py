"""The benchmark of sampling at a tiny size: what it reports, and that it checks first."""

import json
from itertools import product

import pytest
import torch

from benchmarks.sampling import MODELS, main, read_rate, shortfall, token_rate
from model.decode import Matrix

TINY = ("--models", "tiny", "--max-new-tokens", "12", "--runs", "1", "--threads", "1")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    monkeypatch.setattr("benchmarks.sampling.in_own_process", lambda function, *arguments: function(*arguments))


def test_it_reports_shares_and_ratios(capsys):
    pytest.importorskip("transformers", reason="transformers (test extra) is not installed")
    assert main([*TINY, "--batches", "1", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rates = {(row["tool"], row["dtype"], row["batch"]): row["tokens_per_second"] for row in report["rows"]}
    dtypes = ("float32", "bfloat16")
    assert set(rates) == set(product(("transformers", "glassgpt"), dtypes, (1, 3)))
    for row in report["rows"]:
        rate, batch = row["tokens_per_second"], row["batch"]
        quickest = max(rates["transformers", dtype, batch] for dtype in dtypes)
        assert row["of_transformers"] == pytest.approx(rate / quickest)
        assert row["of_batch_1"] == pytest.approx(rate / rates[row["tool"], row["dtype"], 1])
        assert (row["of_limit"] is None) == (batch > 1)
    assert set(report["about"]["limits_tokens_per_second"]["tiny"]) == set(dtypes)


@pytest.mark.parametrize("batch", [1, 2])
def test_right_tokens_have_the_highest_logits(batch):
    assert shortfall("tiny", batch, "float32") < 1e-4
    assert shortfall("tiny", batch, "bfloat16") < 0.1


@pytest.mark.parametrize("part", ["attend", "think"])
def test_a_part_left_out_shows(part, monkeypatch):
    monkeypatch.setattr(f"model.decode._Layer.{part}", lambda *_: None)
    assert shortfall("tiny", 1, "float32") > 0.1


def test_wrong_tokens_are_refused(monkeypatch, capsys):
    right = Matrix.__call__
    monkeypatch.setattr(Matrix, "__call__", lambda self, x: right(self, x).flip(1))
    assert main([*TINY]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "below the best (at most 0.001): nothing is reported" in err


def test_rates():
    """Gaps of 2, 1 and 4 seconds have the median 2: four sequences make two tokens a second."""
    assert token_rate([0.0, 2.0, 3.0, 7.0], 4) == 2.0
    assert 1e8 < read_rate(1 << 22, 32) < 1e13


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--models", "huge"], "choose from tiny, baby, gpt2"),
        (["--models"], "must name at least one"),
        (["--dtypes"], "must name at least one"),
        (["--batches", "0"], "be at least 1"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--models", "tiny", "baby", "--max-new-tokens", "49"], "is 49; the context has room for 48"),
    ],
)
def test_mistakes_are_one_line(wrong, message, capsys):
    assert main(wrong) == 2
    assert message in capsys.readouterr().err


def test_sizes_are_those_of_the_names():
    from model import GPT, ModelConfig

    counts = {}
    for name in ("baby", "gpt2"):
        with torch.device("meta"):
            counts[name] = GPT(ModelConfig(**MODELS[name][0])).n_parameters()
    assert counts["gpt2"] == 124_439_808  # Radford et al. 2019, as loaded by everyone
    assert counts["baby"] - 256 * 384 == pytest.approx(10.65e6, rel=1e-3)
