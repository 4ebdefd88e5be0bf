"""StepCosts: how long a step takes by its number of rows, learned from the steps that run."""

from bisect import bisect_left
from collections.abc import Sequence

# Rows of a step, and what such a step costs relative to one row, until steps of this engine say otherwise.
# Measured with INT4 weights on two Zen 3 cores with AVX2 (SmolLM2-135M, 256 tokens before the rows).
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
_PRIOR = (1.0, 1.05, 1.17, 1.35, 1.85, 2.5, 3.6, 4.5, 6.1, 8.0, 11.2, 14.5, 27.0, 53.0, 105.0)
# A step weighs this much in the average of its number of rows; the first few are averaged evenly.
_WEIGHT = 0.1
# Seconds of a one-row step before the first was measured: only ratios count then.
_FIRST_GUESS = 0.01
# Times of one step may be far off on a busy machine: what is beyond this factor counts as this.
_OUTLIER = 2.0


class StepCosts:
    """A step's seconds as a function of its rows: measured, and elsewhere the prior's shape.

    The time that attention takes for a longer context is part of what is measured, and since it grows slowly
    the average follows it.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * len(_ROWS)
        self._counts = [0] * len(_ROWS)
        self._cached: dict[int, float] = {}

    def count(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        place = bisect_left(_ROWS, rows)
        if place == len(_ROWS):
            return
        if self._counts[place]:
            expected = self.seconds(rows)
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
        # A bucket holds the time of its largest number of rows; others are scaled by the prior.
        seconds *= _PRIOR[place] / _prior(rows)
        self._counts[place] += 1
        weight = max(_WEIGHT, 1.0 / self._counts[place])
        self._seconds[place] += weight * (seconds - self._seconds[place])
        self._cached.clear()

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step of so many rows, at least 1."""
        known = self._cached.get(rows)
        if known is None:
            known = self._cached[rows] = _prior(rows) * self._scale(rows)
        return known

    def _scale(self, rows: int) -> float:
        """Seconds per unit of the prior at `rows`, between the nearest numbers of rows that were measured."""
        measured = [place for place, count in enumerate(self._counts) if count]
        if not measured:
            return _FIRST_GUESS
        scales = [self._seconds[place] / _PRIOR[place] for place in measured]
        return _interpolated(rows, [_ROWS[place] for place in measured], scales)


def _prior(rows: int) -> float:
    if rows > _ROWS[-1]:
        return _PRIOR[-1] * rows / _ROWS[-1]
    return _interpolated(rows, _ROWS, _PRIOR)


def _interpolated(x: float, xs: Sequence[int], ys: Sequence[float]) -> float:
    """Linear between the points, constant beyond them."""
    place = bisect_left(xs, x)
    if place == 0:
        return ys[0]
    if place == len(xs):
        return ys[-1]
    part = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + part * (ys[place] - ys[place - 1])
