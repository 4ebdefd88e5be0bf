"""Estimates of acceptance: they converge, forget, recover, and seldom try what fails."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagelet.runtime.speculation.acceptance import Acceptance


def test_it_starts_at_the_prior() -> None:
    engine = Acceptance([0.25, 0.75], weight=6, window=400, half_life=4000)
    request = Acceptance(engine, weight=3, window=30, half_life=60)
    assert engine.num_kinds == request.num_kinds == 2
    assert [request.rate(kind) for kind in range(2)] == [0.25, 0.75]


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.95])
def test_it_converges(truth: float) -> None:
    rng = random.Random(1)
    acceptance = Acceptance([0.5], weight=4, window=1000, half_life=1e9)
    for _ in range(3000):
        accepted = rng.random() < truth
        acceptance.record(0, int(accepted), int(not accepted))
    # Four standard deviations of a mean of some 1000 trials.
    assert abs(acceptance.rate(0) - truth) < 4 * (truth * (1 - truth) / 1000) ** 0.5 + 0.002


def test_its_first_trials_are_a_beta_mean() -> None:
    acceptance = Acceptance([0.5], weight=4, window=1e6, half_life=1e9)
    acceptance.record(0, 3, 3)
    acceptance.record(0, 6, 0)
    # Of a trial in a window of a million a hundred thousandth has faded at most.
    assert acceptance.rate(0) == pytest.approx((4 * 0.5 + 9) / (4 + 12), rel=1e-5)


def test_many_trials_at_once_are_as_many_one_by_one() -> None:
    at_once, singly = (Acceptance([0.5], weight=1, window=20, half_life=60) for _ in range(2))
    for accepted, failed in [(12, 1), (0, 3), (5, 0)]:
        at_once.record(0, accepted, failed)
        for _ in range(accepted):
            singly.record(0, 1, 0)
        for _ in range(failed):
            singly.record(0, 0, 1)
        assert at_once.rate(0) == pytest.approx(singly.rate(0), rel=1e-12)
        at_once.pass_tokens(7)
        singly.pass_tokens(7)


def test_what_changed_is_seen_within_its_window() -> None:
    acceptance = Acceptance([0.5], weight=1, window=20, half_life=1e9)
    acceptance.record(0, 500, 0)
    assert acceptance.rate(0) > 0.9
    for _ in range(60):
        acceptance.record(0, 0, 1)
    # Of 20 remembered trials e^-3 are still accepted ones.
    assert acceptance.rate(0) < 0.1


def test_kinds_are_apart() -> None:
    acceptance = Acceptance([0.5, 0.5], weight=1, window=20, half_life=100)
    acceptance.record(0, 0, 10)
    assert acceptance.rate(0) < 0.1
    assert acceptance.rate(1) == 0.5


def test_requests_learn_for_those_that_come_later() -> None:
    engine = Acceptance([0.5], weight=6, window=400, half_life=4000)
    first = Acceptance(engine, weight=3, window=30, half_life=60)
    running = Acceptance(engine, weight=3, window=30, half_life=60)
    running.record(0, 30, 0)
    first.record(0, 0, 100)
    later = Acceptance(engine, weight=3, window=30, half_life=60)
    assert later.rate(0) == engine.rate(0) < 0.25
    # What it saw itself weighs more.
    assert first.rate(0) < later.rate(0) < running.rate(0)


def test_it_creeps_back_to_the_prior_with_the_text() -> None:
    acceptance = Acceptance([0.4], weight=1, window=80, half_life=60)
    acceptance.record(0, 0, 200)
    rates = []
    for _ in range(20):
        rates.append(acceptance.rate(0))
        acceptance.pass_tokens(60)
    assert rates[0] < 0.02
    assert rates == sorted(rates)
    # After 19 half-lives less than a ten thousandth of a trial is left.
    assert rates[-1] == pytest.approx(0.4, abs=1e-4)


def test_the_engine_ages_with_each_request() -> None:
    engine = Acceptance([0.4], weight=1, window=30, half_life=100)
    engine.record(0, 0, 200)
    requests = [Acceptance(engine, weight=1, window=30, half_life=60) for _ in range(10)]
    for request in requests:
        request.pass_tokens(200)
    assert engine.rate(0) == pytest.approx(0.4, abs=1e-4)


@pytest.mark.parametrize("prior", [0.15, 0.35, 0.6, 0.99])
@pytest.mark.parametrize("threshold", [0.03, 0.05, 0.1])
def test_what_never_succeeds_is_seldom_tried_yet_again_and_again(prior: float, threshold: float) -> None:
    """As the planner does: tried wherever the estimate reaches what a row costs."""
    engine = Acceptance([prior], weight=6, window=400, half_life=4000)
    request = Acceptance(engine, weight=3, window=30, half_life=60)
    trials = []
    for step in range(20_000):
        request.pass_tokens(1)
        if request.rate(0) >= threshold:
            trials.append(step)
            request.record(0, 0, 1)
    settled = [step for step in trials if step >= 5_000]
    assert len(settled) >= 10
    assert len(settled) <= 15_000 / 30


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 10_000)), max_size=30))
def test_a_rate_is_a_probability(trials: list[tuple[int, int, int]]) -> None:
    engine = Acceptance([0.99], weight=6, window=400, half_life=4000)
    request = Acceptance(engine, weight=3, window=30, half_life=60)
    for accepted, failed, tokens in trials:
        request.record(0, accepted, failed)
        request.pass_tokens(tokens)
        assert 0 <= request.rate(0) <= 1
        assert 0 <= engine.rate(0) <= 1
