"""Spending bits where they help most: which format each matrix gets under a budget, by measured cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagelet.exporter.stacked_rows import WeightFormat
from pagelet.models.errors import InputError


@dataclass(frozen=True)
class Choice:
    """One format that a matrix may get: bytes stored, and KL divergence (nats) it is expected to cost."""

    format: WeightFormat
    num_bytes: int
    cost: float


def allocate(choices: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Choice]:
    """The choices with the least total cost in at most `budget` bytes, by the Lagrangian's greedy walk.

    Each matrix begins at its smallest format; the step along its lower convex hull that saves most cost per
    byte is taken next, over all matrices, while it fits. Costs add up: divergences of small errors do.

    Raises:
        InputError: not even the smallest formats fit.
    """
    hulls = {name: _hull(options) for name, options in choices.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    spent = sum(choice.num_bytes for choice in chosen.values())
    if spent > budget:
        raise InputError(
            f"the smallest formats take {spent} bytes, but the budget is {budget}: raise --bits-per-weight."
        )
    steps = [
        ((low.cost - high.cost) / (high.num_bytes - low.num_bytes), name, high)
        for name, hull in hulls.items()
        for low, high in pairwise(hull)
    ]
    stopped = set()
    for _, name, high in sorted(steps, key=lambda step: -step[0]):  # stable: a hull's steps stay in order
        extra = high.num_bytes - chosen[name].num_bytes
        if name in stopped or spent + extra > budget:
            stopped.add(name)
            continue
        chosen[name] = high
        spent += extra
    return chosen


def _hull(options: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull: larger formats that cost less, the saving per byte falling."""
    hull: list[Choice] = []
    for option in sorted(options, key=lambda option: (option.num_bytes, option.cost)):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        if hull and option.num_bytes == hull[-1].num_bytes:
            continue
        hull.append(option)
    return hull


def _slope(low: Choice, high: Choice) -> float:
    return (low.cost - high.cost) / (high.num_bytes - low.num_bytes)
