"""How the scripts read their arguments and how they end: a user's mistake is one line and exit code 2."""

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import tyro

_Arguments = ParamSpec("_Arguments")
_T = TypeVar("_T")


class NonFiniteLoss(ArithmeticError):
    """Training cannot go on. The bad step has changed nothing; the last checkpoint is finite."""


def parse(form: type[_T], arguments: Sequence[str] | None, prog: str, **options: Any) -> _T:
    """Arguments -> an instance of the dataclass `form`, by tyro. --help prints and exits with code 0.

    ValueError, in one line and with the nearest names, for what does not fit.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(form, args=arguments, prog=prog, **options)
    except SystemExit as exit_:
        if not exit_.code:
            raise
    raise ValueError(f"{_unframed(complaint.getvalue())}; see {prog} --help")


def _unframed(box: str) -> str:
    """tyro's framed message as a line: without the frame, its title and its last hint, and of the options that it
    proposes only the names."""
    text = " ".join(re.sub("[╭╮╰╯│─]|-{9,}", " ", box).split("\n", 1)[-1].split())
    text = re.split(r"For full helptext|Argument helptext:", text)[0]
    text, *proposed = re.split("Perhaps you meant:|Arguments similar to", text)
    names = re.findall(r"(?<!\S)--[\w.-]+(?!\S)", " ".join(proposed))
    text = re.sub(r"^(\w+): (?=\1\.)", "", text.strip().removeprefix("Error parsing "))
    return f"{text}; perhaps you meant {' or '.join(names[:3])}" if names else text


def printable(text: str) -> str:
    """The text for a terminal: what could steer it, or hide, is escaped; line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(error: object) -> str:
    """The message of an error, which may quote a hostile file."""
    return printable(" ".join(str(error).split()))


def exit_on_user_error(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
    """Wraps a script's main: ValueError and OSError become one line on stderr and code 2, Ctrl-C code 130.

    GLASSGPT_DEBUG=1 in the environment shows the traceback instead.
    """

    @functools.wraps(main)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> int:
        if sys.stdout is None:  # closed by whoever started us
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a model's text may hold what the terminal cannot show
        # Read when torch loads: its threads then wait for work asleep after some microseconds, not spinning. On a busy
        # machine, where spinning takes the core from the thread that is waited for, a step is up to 10 times quicker.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
        script = os.path.basename(sys.modules[main.__module__].__file__ or main.__module__)
        try:
            return main(*args, **kwargs)
        except BrokenPipeError:
            # The reader of our output (head, less) has gone; Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, OSError, OverflowError) as error:  # the last: a number beyond what a processor can hold
            if os.environ.get("GLASSGPT_DEBUG"):
                raise
            print(f"{script}: {one_line(error)}", file=sys.stderr)
            return 2
        except (MemoryError, RuntimeError) as error:  # torch has no class of its own for what a CPU cannot hold
            is_memory = isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error))
            if os.environ.get("GLASSGPT_DEBUG") or not is_memory:
                raise
            print(f"{script}: {one_line(error)[:200]}: more than this machine can hold at once", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{script}: interrupted", file=sys.stderr)
            return 130

    return wrapped
