"""How a script ends: a user's mistake is one line and code 2; Ctrl-C; what is shown until then."""

import importlib
import os
import signal
import sys
from dataclasses import dataclass

import pytest

from tests.tiny import REPOSITORY, finish, start, tiny_config, tiny_flags
from train import main, train
from training.cli import exit_on_user_error, parse, printable


@dataclass(frozen=True)
class Form:
    """A form."""

    size: int = 3
    """A size."""
    colour: str = "red"
    """A colour."""


def test_arguments_become_the_form():
    assert parse(Form, ["--size", "4"], "prog") == Form(4, "red")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--size", "x"], ["--size", "'x'"]),
        (["--colr", "blue"], ["--colr", "perhaps you meant --colour"]),
        (["--size"], ["--size"]),
        (["blue"], ["blue"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments, expected, capsys):
    with pytest.raises(ValueError) as caught:
        parse(Form, arguments, "prog.py")
    message = str(caught.value)
    assert "\n" not in message
    assert not set(message) & set("╭╮╰╯│─")
    assert message.endswith("; see prog.py --help")
    assert all(fragment in message for fragment in expected)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_mistake_reads_the_same_where_the_terminal_knows_ascii_only(encoding):
    code = "from training.config import parse_arguments; parse_arguments({!r}, 'train.py')"
    _, _, err = finish(start("-c", code.format(["--model.n_layr", "3", "--zap"]), PYTHONIOENCODING=encoding))
    told = "ValueError: Unrecognized options: --model.n_layr, 3, --zap; perhaps you meant --model.n_layer"
    assert err.splitlines()[-1].startswith(told)
    assert "----" not in err.splitlines()[-1]


def test_help_exits_with_code_0(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(Form, ["--help"], "prog.py")
    assert exit_.value.code == 0
    assert "A colour." in capsys.readouterr().out


TOO_MUCH = ": more than this machine can hold at once\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("too\n   long"), 2, "test_cli.py: too long\n"),
        (FileNotFoundError(2, "No such file", "x.txt"), 2, "test_cli.py: [Errno 2] No such file: 'x.txt'\n"),
        (ValueError("a\x1b]0;b\x07 \u202ec\udcff"), 2, "test_cli.py: a\\x1b]0;b\\x07 \\u202ec\\udcff\n"),
        (OverflowError("int too large"), 2, "test_cli.py: int too large\n"),
        (MemoryError("Unable to allocate 9 TiB"), 2, f"test_cli.py: Unable to allocate 9 TiB{TOO_MUCH}"),
        (RuntimeError("x: can't allocate memory: 9 B"), 2, f"test_cli.py: x: can't allocate memory: 9 B{TOO_MUCH}"),
        (RuntimeError("CUDA out of memory."), 2, f"test_cli.py: CUDA out of memory.{TOO_MUCH}"),
        (KeyboardInterrupt(), 130, "test_cli.py: interrupted\n"),
    ],
)
def test_user_errors_end_in_one_line_and_a_code(error, code, line, capsys, monkeypatch):
    monkeypatch.delenv("GLASSGPT_DEBUG", raising=False)

    @exit_on_user_error
    def main() -> int:
        raise error

    assert main() == code
    assert capsys.readouterr() == ("", line)


def test_errors_of_ours_keep_their_traceback(monkeypatch):
    @exit_on_user_error
    def main(error: Exception) -> int:
        raise error

    with pytest.raises(ZeroDivisionError):
        main(ZeroDivisionError())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        main(RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setenv("GLASSGPT_DEBUG", "1")
    with pytest.raises(ValueError, match="mine"):
        main(ValueError("mine"))


def test_a_closed_stdout_is_no_error(monkeypatch):
    @exit_on_user_error
    def main() -> int:
        with sys.stdout as out:
            return out.write("text") - 4

    monkeypatch.setattr(sys, "stdout", None)
    assert main() == 0


def test_what_could_steer_a_terminal_is_escaped_and_text_of_any_script_is_not():
    assert printable("a\x1b[2J\x9b\x07\r\0\u202e\x7f") == r"a\x1b[2J\x9b\x07\r\x00\u202e\x7f"
    text = "苹果 é 😀\t\n"
    assert printable(text) == text


_SCRIPT = """
import sys
from training.cli import exit_on_user_error

@exit_on_user_error
def main():
    {body}

sys.exit(main())
"""


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(body="while True: print('x' * 10_000)"))
    with start(str(script), PYTHONPATH=str(REPOSITORY)) as process:
        begun = process.stdout.read(10)
        process.stdout.close()
        complaint = process.stderr.read()
    assert (begun, complaint, process.returncode) == ("x" * 10, "", 141)


def test_text_that_the_terminal_cannot_show_does_not_end_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(body="print('1024³ 苹果'); return 0"), encoding="utf-8")
    ended = finish(start(str(script), PYTHONPATH=str(REPOSITORY), PYTHONIOENCODING="ascii"))
    assert ended == (0, "1024? ??\n", "")


def test_ctrl_c_ends_after_the_step_and_a_second_one_at_once(tmp_path, monkeypatch, capsys):
    module = importlib.import_module("training.evaluate")
    honest = module.evaluate

    def interrupt(*args, n_signals, **options):
        for _ in range(n_signals):
            os.kill(os.getpid(), signal.SIGINT)
        return honest(*args, **options)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for n_signals, code in ((1, 130), (2, 130)):
        name = f"run{n_signals}"
        monkeypatch.setattr(module, "evaluate", lambda *a, n=n_signals, **o: interrupt(*a, n_signals=n, **o))
        assert main(tiny_flags(tmp_path, name)) == code
        out, err = capsys.readouterr()
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
        assert ("stopped after step 5 of 20; the same command continues" in out) is (n_signals == 1)
        assert err == ("" if n_signals == 1 else "train.py: interrupted\n")
        assert (tmp_path / name / "last.pt").exists() is (n_signals == 1)


def test_progress_goes_to_the_terminal_only_when_asked(tmp_path, capsys):
    train(tiny_config(tmp_path, "quiet", max_steps=2))
    assert capsys.readouterr().err == ""
    train(tiny_config(tmp_path, "shown", max_steps=2, progress="True"))
    shown = capsys.readouterr().err
    assert "training" in shown
    assert "2/2" in shown
    assert "tokens/s" in shown
