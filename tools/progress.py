"""Progress bars: on stderr, and only on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm


@contextlib.contextmanager
def bar(title: str, unit: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback (done, total, name of the next) that moves a bar."""
    with tqdm(desc=title, unit=unit, leave=False, file=sys.stderr, disable=not sys.stderr.isatty()) as line:

        def show(done: int, total: int, name: str) -> None:
            line.total = total
            line.set_postfix_str(name, refresh=False)
            line.update(done - line.n)

        yield show
