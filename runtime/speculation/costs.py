"""StepCosts: how long a step takes by its number of rows, learned from the steps that run."""

from bisect import bisect_left
from functools import cache

# Rows of a step, and what such a step costs relative to one row, until steps of this engine say otherwise.
# Measured with INT4 weights on two Zen 3 cores with AVX2 (SmolLM2-135M, 256 tokens before the rows).
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
_PRIOR = (1.0, 1.05, 1.17, 1.35, 1.85, 2.5, 3.6, 4.5, 6.1, 8.0, 11.2, 14.5, 27.0, 53.0, 105.0)
# A step weighs this much in the average of its number of rows, and in that of all steps; the first few are
# averaged evenly.
_WEIGHT = 0.1
_WEIGHT_IN_ALL = 0.02
# Steps after which what was measured for a number of rows counts half, against what all steps say: a time
# that a busy machine made too long would otherwise keep these rows from being tried again.
_HALF_LIFE = 100
# Seconds of a one-row step before the first was measured: only ratios count then.
_FIRST_GUESS = 0.01
# On a busy machine single steps take far too long: beyond this factor they count as this.
_OUTLIER = 2.0


class StepCosts:
    """A step's seconds as a function of its rows: the prior's shape, scaled by what was measured.

    The time that attention takes for a longer context is part of what is measured, and since it grows slowly
    the averages follow it.
    """

    def __init__(self) -> None:
        self._steps = 0
        # Seconds per unit of the prior: over all steps, and of each number of rows, with the step when it
        # was last measured.
        self._in_all = _FIRST_GUESS
        self._scales = [_FIRST_GUESS] * len(_ROWS)
        self._counts = [0] * len(_ROWS)
        self._measured = [0] * len(_ROWS)
        self._cached: dict[int, float] = {}

    def count(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        place = bisect_left(_ROWS, rows)
        if place == len(_ROWS):
            return
        scale = seconds / _prior(rows)
        if self._steps:
            expected = self._scale(place)
            scale = min(max(scale, expected / _OUTLIER), expected * _OUTLIER)
        self._steps += 1
        self._counts[place] += 1
        self._measured[place] = self._steps
        self._in_all += max(_WEIGHT_IN_ALL, 1.0 / self._steps) * (scale - self._in_all)
        self._scales[place] += max(_WEIGHT, 1.0 / self._counts[place]) * (scale - self._scales[place])
        self._cached.clear()

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step of so many rows, at least 1."""
        known = self._cached.get(rows)
        if known is None:
            known = self._cached[rows] = _prior(rows) * self._scale_at(rows)
        return known

    def _scale_at(self, rows: int) -> float:
        low, high, part = _between(rows)
        return (1.0 - part) * self._scale(low) + part * self._scale(high)

    def _scale(self, place: int) -> float:
        """Seconds per unit of the prior at a number of rows: what was measured there, the less the older."""
        if not self._counts[place]:
            return self._in_all
        trust: float = 0.5 ** ((self._steps - self._measured[place]) / _HALF_LIFE)
        return self._in_all + trust * (self._scales[place] - self._in_all)


@cache
def _between(rows: int) -> tuple[int, int, float]:
    """The two places in the table around a number of rows, and how far it is from the first to the second."""
    place = min(bisect_left(_ROWS, rows), len(_ROWS) - 1)
    if _ROWS[place] <= rows:
        return place, place, 0.0
    first, last = _ROWS[place - 1], _ROWS[place]
    return place - 1, place, (rows - first) / (last - first)


@cache
def _prior(rows: int) -> float:
    low, high, part = _between(rows)
    beyond = max(1.0, rows / _ROWS[-1])
    return ((1.0 - part) * _PRIOR[low] + part * _PRIOR[high]) * beyond
