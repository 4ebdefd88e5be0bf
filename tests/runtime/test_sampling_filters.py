"""Top-k, top-p and min-p keep what transformers' warpers keep, ties and boundaries included."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pagelet.runtime.sampling.filters import active_filters, surviving

Scores = NDArray[np.float32]


@st.composite
def scores(draw: st.DrawFn) -> Scores:
    """Random logits; rounded ones are full of ties, and some tokens are masked out."""
    size = draw(st.integers(2, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.normal(0, draw(st.sampled_from([0.0, 0.5, 3.0, 20.0])), size).astype(np.float32)
    if draw(st.booleans()):
        values = np.round(values * 2) / 2
    values[rng.random(size) < draw(st.sampled_from([0.0, 0.3]))] = -np.inf
    values[rng.integers(size)] = 1.0
    return values


def kept_by_transformers(values: Scores, k: int, p: float, fraction: float) -> set[int]:
    warpers = LogitsProcessorList()
    if k:
        warpers.append(TopKLogitsWarper(k))
    if p < 1:
        warpers.append(TopPLogitsWarper(p))
    if fraction:
        warpers.append(MinPLogitsWarper(fraction))
    warped = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(values)[None])[0].numpy()
    return set(np.flatnonzero(warped > -np.inf).tolist())


def assume_off_the_boundary(values: Scores, p: float, fraction: float) -> None:
    """Rejects examples in which float32 rounding decides about a token.

    transformers sums float32 probabilities, of up to 300 tokens here: 300 * 2**-24 is 2e-5 at the very most.
    """
    weights = np.exp(np.sort(values.astype(np.float64)) - values.max())
    sums = np.cumsum(weights) / weights.sum()
    assume(p == 1 or not np.any(np.abs(sums - (1 - p)) < 2e-5))
    assume(fraction in (0, 1) or not np.any(np.abs(weights - fraction) < 1e-5 * fraction))


@settings(max_examples=150, deadline=None)
@given(
    scores(),
    st.sampled_from([0, 1, 2, 5, 40, 1000]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.01, 0.3, 1.0]),
)
def test_the_same_tokens_survive(values: Scores, k: int, p: float, fraction: float) -> None:
    after_k = values[surviving(values, active_filters(k, 1.0, 0.0))] if k else values
    assume_off_the_boundary(after_k, p, fraction)
    kept = surviving(values, active_filters(k, p, fraction))
    expected = sorted(kept_by_transformers(values, k, p, fraction))
    assert np.array_equal(np.sort(values[kept]), np.sort(values[expected]))
    if np.unique(values).size == values.size or p == 1.0:  # of equals, top-p may keep others
        assert kept.tolist() == expected


def test_ties_at_the_edge_of_top_k_all_stay() -> None:
    values = np.array([1, 3, 2, 2, 2, 0], np.float32)
    assert surviving(values, active_filters(2, 1.0, 0.0)).tolist() == [1, 2, 3, 4]


def test_ties_at_the_edge_of_top_p_go_to_the_lower_ids() -> None:
    values = np.zeros(8, np.float32)  # each has 1/8
    assert surviving(values, active_filters(0, 0.3, 0.0)).tolist() == [0, 1, 2]
    assert len(kept_by_transformers(values, 0, 0.3, 0.0)) == 3


@pytest.mark.parametrize("p", [0.5, 0.95, 0.9999])
def test_a_large_vocabulary_keeps_the_smallest_set_that_reaches_p(p: float) -> None:
    values = np.random.default_rng(3).normal(0, 3, 50_000).astype(np.float32)
    kept = surviving(values, active_filters(0, p, 0.0))
    probabilities = np.exp(values.astype(np.float64))
    probabilities /= probabilities.sum()
    without_last = np.sort(probabilities[kept])[1:].sum()
    # 1e-6: the total is a sum of float32 weights, each rounded to 2**-24 of itself, hardly correlated.
    assert without_last - 1e-6 < p < probabilities[kept].sum() + 1e-6
    assert np.sort(values)[-kept.size :].tolist() == np.sort(values[kept]).tolist()
