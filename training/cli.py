"""How the scripts end: a user's mistake is one line and exit code 2, never a traceback."""

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

_Arguments = ParamSpec("_Arguments")


def exit_on_user_error(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
    """Wraps a script's main: ValueError and OSError become one line on stderr and code 2, Ctrl-C code 130.

    GLASSGPT_DEBUG=1 in the environment shows the traceback instead.
    """

    @functools.wraps(main)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> int:
        script = os.path.basename(sys.modules[main.__module__].__file__ or main.__module__)
        try:
            return main(*args, **kwargs)
        except BrokenPipeError:
            # The reader of our output (head, less) has gone; Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, OSError) as error:
            if os.environ.get("GLASSGPT_DEBUG"):
                raise
            print(f"{script}: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{script}: interrupted", file=sys.stderr)
            return 130

    return wrapped
