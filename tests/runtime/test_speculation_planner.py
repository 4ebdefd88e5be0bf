"""The plan against all there are, what a chain is expected to give, and the costs that it rests on."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagelet.runtime.speculation.costs import StepCosts
from pagelet.runtime.speculation.planner import likelihoods, plan
from pagelet.runtime.speculation.proposal import Candidate

PROBABILITIES = st.floats(0.0, 1.0)


def chain(probabilities: Sequence[float]) -> list[Candidate]:
    return [Candidate(5, index - 1, probability) for index, probability in enumerate(probabilities)]


@st.composite
def trees(draw: st.DrawFn, max_size: int = 8) -> list[Candidate]:
    probabilities = draw(st.lists(PROBABILITIES, max_size=max_size))
    return [Candidate(5, draw(st.integers(-1, i - 1)), p) for i, p in enumerate(probabilities)]


@given(
    outlooks=st.lists(st.lists(PROBABILITIES, max_size=4).map(chain) | trees(4), max_size=2),
    idle=st.integers(0, 2),
    costs=st.lists(st.floats(0.01, 10.0), min_size=12, max_size=12),
    limit=st.integers(0, 8),
)
def test_it_is_the_best_of_all_plans(
    outlooks: list[list[Candidate]], idle: int, costs: list[float], limit: int
) -> None:
    """Up to eight candidates every number of them is tried, so that nothing can be missed."""
    num_sequences = len(outlooks) + idle

    def seconds(lengths: Sequence[int]) -> float:
        return costs[num_sequences + sum(lengths)] if num_sequences + sum(lengths) < 12 else 10.0

    def rate(lengths: Sequence[int]) -> float:
        gains = (sum(likelihoods(o)[:length]) for o, length in zip(outlooks, lengths, strict=True))
        return (num_sequences + sum(gains)) / seconds(lengths)

    lengths, best = plan(outlooks, num_sequences, seconds, limit)
    every = itertools.product(*(range(len(outlook) + 1) for outlook in outlooks))
    allowed = [choice for choice in every if sum(choice) <= limit]
    assert sum(lengths) <= limit
    assert all(0 <= length <= len(outlook) for length, outlook in zip(lengths, outlooks, strict=True))
    # The order in which probabilities are summed differs.
    assert best == pytest.approx(rate(lengths), rel=1e-9)
    assert best == pytest.approx(max(map(rate, allowed)), rel=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("length", [0, 1, 4, 15])
def test_a_chain_is_expected_to_give_a_geometric_series(alpha: float, length: int) -> None:
    expected = (1 - alpha ** (length + 1)) / (1 - alpha)
    assert 1 + sum(likelihoods(chain([alpha] * length))) == pytest.approx(expected, rel=1e-12)
    # With steps that cost the same however long they are, all that is likely at all is verified.
    lengths, rate = plan([chain([alpha] * length)], 1, lambda lengths: 2.0, limit=64)
    assert lengths == [length if alpha else 0]
    assert rate == pytest.approx(expected / 2.0, rel=1e-12)


@given(trees(20))
def test_a_beginning_is_always_likelier_than_what_follows(tree: list[Candidate]) -> None:
    found = likelihoods(tree)
    assert len(found) == len(tree)
    assert found == sorted(found, reverse=True)
    paths: list[float] = []
    for candidate, likelihood in zip(tree, found, strict=True):
        paths.append(candidate.probability * (paths[candidate.parent] if candidate.parent >= 0 else 1.0))
        assert 0.0 <= likelihood <= paths[-1]


def test_candidates_go_where_they_are_likeliest() -> None:
    sure, unsure = chain([0.95] * 8), chain([0.4] * 8)
    # The ninth likeliest is the first of those that are not sure.
    assert plan([unsure, sure], 2, lambda lengths: 1.0, limit=9)[0] == [1, 8]
    # Where steps are dear, only those that are all but certain pay.
    assert plan([unsure, sure], 2, lambda lengths: 1.0 + 5.0 * sum(lengths), limit=64)[0] == [0, 0]
    assert plan([unsure, sure], 2, lambda lengths: 1.0, limit=5)[0] == [0, 5]


def test_the_limit_bounds_a_step_of_many_sequences() -> None:
    outlooks = [chain([0.9] * 48) for _ in range(32)]
    lengths, _ = plan(outlooks, 32, lambda lengths: 1.0, limit=64)
    assert lengths == [2] * 32


def test_unknown_costs_have_the_priors_shape() -> None:
    costs = StepCosts()
    before = [costs.seconds(rows) for rows in range(1, 700)]
    assert before == sorted(before)
    assert all(seconds > 0 for seconds in before)
    costs.count(1, 3.0)
    # Every number of rows is scaled with the one that is known.
    for rows, seconds in enumerate(before, 1):
        assert costs.seconds(rows) == pytest.approx(seconds / before[0] * 3.0, rel=1e-9)


@pytest.mark.parametrize("shape", [
    lambda rows: 0.5,
    lambda rows: 0.001 * rows,
    lambda rows: 0.01 + 0.004 * max(0, rows - 4),
], ids=["flat", "linear", "bent"])  # fmt: skip
def test_costs_are_learned(shape: Callable[[int], float]) -> None:
    costs = StepCosts()
    measured = (1, 2, 3, 4, 6, 8, 12, 16)
    for _ in range(200):
        for rows in measured:
            costs.count(rows, shape(rows))
    # What is eight steps old leans by a twentieth to the average of all, here up to three times as much.
    for rows in measured:
        assert costs.seconds(rows) == pytest.approx(shape(rows), rel=0.15)


def test_between_two_measured_ones_costs_are_between_them() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.count(4, 1.0)
        costs.count(8, 3.0)
    for rows in (5, 6, 7):
        assert costs.seconds(4) < costs.seconds(rows) < costs.seconds(8)
    assert costs.seconds(5) < costs.seconds(6) < costs.seconds(7)


def test_an_outlier_counts_little() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.count(4, 1.0)
    costs.count(4, 1000.0)
    after_long = costs.seconds(4)
    assert 1.0 <= after_long < 1.15
    costs.count(4, 1e-9)
    assert costs.seconds(4) > 0.9
    for _ in range(100):
        costs.count(4, 1.0)
    assert costs.seconds(4) == pytest.approx(1.0, rel=0.01)


def test_a_change_that_lasts_is_followed() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.count(2, 1.0)
    for _ in range(150):
        costs.count(2, 5.0)
    assert costs.seconds(2) == pytest.approx(5.0, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-6, 10.0)), max_size=60))
def test_costs_are_always_positive_numbers(steps: list[tuple[int, float]]) -> None:
    costs = StepCosts()
    for rows, seconds in steps:
        costs.count(rows, seconds)
    for rows in (1, 2, 5, 17, 64, 500, 513, 5000):
        assert 0 < costs.seconds(rows) < math.inf
