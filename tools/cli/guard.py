"""How a program of ours ends: errors in one line, Ctrl-C and closed pipes without a traceback."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from pagelet.models.errors import PageletError


def guarded(name: str, body: Callable[[], None], *, debug: bool = False) -> int:
    """Run `body`; the exit status.

    0; 1 for a PageletError (raised on if `debug`) or a reader that went away; 130 after Ctrl-C or SIGTERM.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        body()
        sys.stdout.flush()
    except PageletError as error:
        if debug:
            raise
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{name}: stopped" if sys.stderr.isatty() else f"{name}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `pagelet … | head`: nothing is left to say; at exit Python must not try to say the rest either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _terminate(signum: int, frame: FrameType | None) -> None:
    """A polite end takes the same road as Ctrl-C, so that temporary files are removed."""
    raise KeyboardInterrupt
