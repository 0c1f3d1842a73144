"""The benchmark of start-up: what a command must say to be timed."""

import pytest

from benchmarks.startup import main, until_end, until_metrics, until_text


def test_a_right_answer_is_timed_and_a_wrong_one_ends_it():
    assert 0 < until_end(0, "usage:", "sample.py", "--help") < 60
    with pytest.raises(ValueError, match=r"sample\.py --help ended with 0"):
        until_end(2, "usage:", "sample.py", "--help")
    with pytest.raises(ValueError, match="ended with 0: nothing else"):
        until_end(0, "nothing like it", "-c", "print('nothing else')")


def test_signs_are_waited_for(tmp_path):
    file = tmp_path / "metrics.jsonl"
    row = '{"step": 1, "loss": 2}'
    late = f"import time; time.sleep(0.2); open({str(file)!r}, 'w').write({row!r})"
    assert 0.2 < until_metrics(tmp_path, "-c", late) < 60
    assert 0.2 < until_text("-c", "import time; time.sleep(0.2); print('a')") < 60
    with pytest.raises(ValueError, match="wrote no text"):
        until_text("-c", "pass")


def test_mistakes_are_one_line(capsys):
    assert main(["--runs", "0"]) == 2
    assert "--runs is 0" in capsys.readouterr().err
