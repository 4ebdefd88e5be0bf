"""Spending a budget, against every way to spend it."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagelet.exporter.quantize.allocation import Choice, allocate
from pagelet.models.errors import InputError
from pagelet.plugins.packing import LinearFormat

FORMAT = LinearFormat()
Choices = Mapping[str, Sequence[Choice]]

# Quarters: their sums and differences are exact, and ties and collinear points are frequent.
costs = st.integers(0, 40).map(lambda quarters: quarters / 4)
options = st.lists(st.tuples(st.integers(1, 30), costs), min_size=1, max_size=4)
instances = st.lists(options, min_size=1, max_size=4).map(
    lambda matrices: {
        f"m{number}": [Choice(FORMAT, *option) for option in matrix] for number, matrix in enumerate(matrices)
    }
)


def smallest(choices: Choices) -> int:
    return sum(min(option.num_bytes for option in matrix) for matrix in choices.values())


def spent(chosen: Mapping[str, Choice]) -> int:
    return sum(choice.num_bytes for choice in chosen.values())


def cost(chosen: Mapping[str, Choice]) -> float:
    return sum(choice.cost for choice in chosen.values())


def best(choices: Choices, budget: int) -> float:
    """The least cost of all combinations within the budget."""
    return min(
        sum(option.cost for option in combination)
        for combination in product(*choices.values())
        if sum(option.num_bytes for option in combination) <= budget
    )


def cost_at(matrix: Sequence[Choice], num_bytes: Fraction) -> Fraction:
    """The least cost of a matrix in so many bytes where formats may be mixed: any two, in any shares."""
    reached = [Fraction(option.cost) for option in matrix if option.num_bytes <= num_bytes]
    for low, high in combinations(sorted(matrix, key=lambda option: option.num_bytes), 2):
        if low.num_bytes <= num_bytes < high.num_bytes:
            share = (num_bytes - low.num_bytes) / (high.num_bytes - low.num_bytes)
            reached.append((1 - share) * Fraction(low.cost) + share * Fraction(high.cost))
    return min(reached)


def relaxed(choices: Choices, budget: int) -> Fraction:
    """The least cost where formats may be mixed: by its dual, whose maximum lies at a slope of some pair.

    min over x of cost + λ (bytes - budget), λ >= 0, is a lower bound, and for this linear program its largest
    is the optimum.
    """
    slopes = {Fraction(0)}
    for matrix in choices.values():
        for a, b in combinations(matrix, 2):
            if a.num_bytes != b.num_bytes:
                slopes.add(max(Fraction(a.cost - b.cost) / (b.num_bytes - a.num_bytes), Fraction(0)))
    return max(
        sum(
            min(Fraction(option.cost) + price * option.num_bytes for option in matrix)
            for matrix in choices.values()
        )
        - price * budget
        for price in slopes
    )


@settings(max_examples=200, deadline=None)
@given(instances, st.integers(0, 100))
def test_the_cost_is_within_one_step_of_the_best(choices: Choices, extra: int) -> None:
    budget = smallest(choices) + extra
    chosen = allocate(choices, budget)
    assert chosen.keys() == choices.keys()
    assert all(chosen[name] in matrix for name, matrix in choices.items())
    assert spent(chosen) <= budget
    # What one matrix would still save at most, going from where it is to its best format.
    step = max(chosen[name].cost - min(option.cost for option in matrix) for name, matrix in choices.items())
    assert relaxed(choices, budget) <= best(choices, budget) <= cost(chosen)
    assert cost(chosen) <= relaxed(choices, budget) + Fraction(step)


@settings(max_examples=200, deadline=None)
@given(instances, st.integers(0, 20), st.integers(1, 10))
def test_a_budget_that_a_price_would_spend_is_spent_best(
    choices: Choices, numerator: int, denominator: int
) -> None:
    """Where each matrix takes what pays at one price per byte, mixing formats would gain nothing."""
    price = Fraction(numerator, denominator)
    bought = {
        name: min(
            matrix, key=lambda option: (Fraction(option.cost) + price * option.num_bytes, option.num_bytes)
        )
        for name, matrix in choices.items()
    }
    budget = spent(bought)
    assert (
        cost(allocate(choices, budget)) == cost(bought) == relaxed(choices, budget) == best(choices, budget)
    )


@settings(max_examples=100, deadline=None)
@given(instances, st.integers(0, 100))
def test_each_matrix_stands_on_its_own_hull(choices: Choices, extra: int) -> None:
    """No mixture of its formats in as many bytes costs less."""
    chosen = allocate(choices, smallest(choices) + extra)
    for name, matrix in choices.items():
        assert Fraction(chosen[name].cost) == cost_at(matrix, Fraction(chosen[name].num_bytes))


@settings(max_examples=100, deadline=None)
@given(instances)
def test_without_a_limit_each_matrix_gets_its_best(choices: Choices) -> None:
    chosen = allocate(choices, 10_000)
    for name, matrix in choices.items():
        least = min(option.cost for option in matrix)
        assert chosen[name].cost == least
        assert chosen[name].num_bytes == min(o.num_bytes for o in matrix if o.cost == least)


@settings(max_examples=100, deadline=None)
@given(instances)
def test_the_smallest_budget_is_spent_on_the_smallest_formats(choices: Choices) -> None:
    budget = smallest(choices)
    chosen = allocate(choices, budget)
    assert spent(chosen) == budget
    for name, matrix in choices.items():
        least = min(option.num_bytes for option in matrix)
        assert chosen[name].cost == min(o.cost for o in matrix if o.num_bytes == least)
    with pytest.raises(
        InputError, match=f"take {budget} bytes, but the budget is {budget - 1}: raise --bits-per-weight"
    ):
        allocate(choices, budget - 1)


@settings(max_examples=100, deadline=None)
@given(instances, st.integers(0, 60), st.integers(0, 60))
def test_choices_do_not_depend_on_their_order(choices: Choices, extra: int, turn: int) -> None:
    budget = smallest(choices) + extra
    turned = {
        name: [*matrix[turn % len(matrix) :], *matrix[: turn % len(matrix)]]
        for name, matrix in choices.items()
    }
    assert allocate(turned, budget) == allocate(choices, budget)


def test_bits_go_where_they_save_most() -> None:
    def matrix(unit: float) -> list[Choice]:
        return [Choice(FORMAT, 10, unit), Choice(FORMAT, 12, unit / 2), Choice(FORMAT, 20, 0.0)]

    choices = {"dull": matrix(1.0), "keen": matrix(100.0)}
    sizes = {
        budget: tuple(choice.num_bytes for choice in allocate(choices, budget).values())
        for budget in (20, 22, 24, 30, 32, 40)
    }
    # keen: 25 a byte, then 6.25; dull: 0.25 a byte, then 0.06. With 24 keen's second step does not fit.
    assert sizes == {20: (10, 10), 22: (10, 12), 24: (12, 12), 30: (10, 20), 32: (12, 20), 40: (20, 20)}


def test_a_format_above_the_hull_is_never_taken() -> None:
    choices = {"a": [Choice(FORMAT, 10, 8.0), Choice(FORMAT, 14, 7.0), Choice(FORMAT, 18, 0.0)]}
    assert allocate(choices, 17)["a"].num_bytes == 10
    assert allocate(choices, 18)["a"].num_bytes == 18
