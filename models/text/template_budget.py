"""What one render of a chat template may use: characters and items made, steps taken, seconds."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from jinja2.exceptions import SecurityError

MAX_RENDERED_CHARACTERS = 64 << 20
MAX_MADE_CHARACTERS = 8 * MAX_RENDERED_CHARACTERS
MAX_STEPS = 5_000_000
MAX_SECONDS = 10.0
_MAX_EXPONENT = 1_024
_MAX_BITS = 1 << 16

# What an item counts as, in characters: a pointer in a list, or a pointer and a small object of its own.
POINTER, ITEM = 8, 64

_Value = TypeVar("_Value")
_DIGITS = re.compile(r"\d+")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class Budget:
    """Counts what a render makes and does; each method raises SecurityError where that is too much."""

    def __init__(self) -> None:
        self._made = 0
        self._steps = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError(f"the template used too much: more than {MAX_STEPS} loop rounds and calls")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"the template used too much: more than {MAX_SECONDS:g} seconds")

    def charge(self, size: int) -> None:
        """Called before a value of at most `size` characters is made."""
        self._made += size
        if size > MAX_RENDERED_CHARACTERS or self._made > MAX_MADE_CHARACTERS:
            raise SecurityError(f"the template used too much: a value of {size} characters is too large")

    def made(self, value: _Value) -> _Value:
        """`value`, charged afterwards: for what is never larger than what it is made from."""
        self.charge(shallow(value))
        return value


_CURRENT: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def new_budget() -> Iterator[None]:
    token = _CURRENT.set(Budget())
    try:
        yield
    finally:
        _CURRENT.reset(token)


def budget() -> Budget:
    """The running render's. A template is compiled without one: by the LookupError nothing is folded."""
    return _CURRENT.get()


def shallow(value: object) -> int:
    """Characters of a text, pointers of a container."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return POINTER * len(value) if isinstance(value, (list, tuple, dict, set)) else 0


def extent(value: object) -> int:
    """About how many characters `str(value)` has; the walk ends once it is too many.

    A list can hold another one twice, and that one another twice: its text doubles with every level.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 2
    if not isinstance(value, (list, tuple, dict)):
        return ITEM
    size = ITEM
    for item in value:
        size += ITEM + extent(item) + (extent(value[item]) if isinstance(value, dict) else 0)
        if size > MAX_RENDERED_CHARACTERS:
            break
    return size


def lines(text: str) -> int:
    """At least the number of `text.splitlines()`."""
    return 1 + sum(map(text.count, _LINE_ENDS))


def widths(pattern: str, values: Any) -> int:
    """The largest width or precision in a format, one taken from the values (`*`) included."""
    found = [int(digits) if len(digits) < 12 else 1 << 40 for digits in _DIGITS.findall(pattern)]
    if "*" in pattern:
        listed = values if isinstance(values, tuple) else (values,)
        found += [abs(value) for value in listed if isinstance(value, int)]
    return max(found, default=0)


def percent_size(pattern: str, values: Any) -> int:
    """At least the characters of `pattern % values`."""
    return len(pattern) + pattern.count("%") * (widths(pattern, values) + extent(values))


def check_numbers(*values: object) -> None:
    """No count or width that a filter or a method is given may be larger than a text may be."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_RENDERED_CHARACTERS:
            raise SecurityError("the template used too much: a number it passes to a function is too large")


def operator_size(operator: str, left: Any, right: Any) -> int:
    """At least the characters of the operator's result.

    Raises:
        SecurityError: a number of too many digits.
    """
    if isinstance(left, int) and isinstance(right, int):
        powers = operator == "**" and max(abs(left), abs(right)) > _MAX_EXPONENT
        if powers or (operator == "*" and left.bit_length() + right.bit_length() > _MAX_BITS):
            raise SecurityError(f"the result of {operator!r} is too large")
        return 0
    if operator == "%":
        return percent_size(left, right) if isinstance(left, str) else 0
    if operator == "*":
        pairs = ((left, right), (right, left))
        return max((shallow(side) * count for side, count in pairs if isinstance(count, int)), default=0)
    return shallow(left) + shallow(right) if operator == "+" else 0
