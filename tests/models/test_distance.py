"""Distances between logits, against their definitions in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagelet.models.distance import (
    LogitsDistance,
    kl_divergence,
    log_softmax,
    relative_error,
    token_losses,
)


def random_logits(rows: int, vocab: int, seed: int, spread: float = 4.0) -> np.ndarray:
    return np.float32(np.random.default_rng(seed).standard_normal((rows, vocab)) * spread)


def exact(logits: np.ndarray) -> torch.Tensor:
    return torch.log_softmax(torch.from_numpy(logits).double(), -1)


def test_log_softmax_of_large_logits() -> None:
    logits = np.float32([[1e4, 1e4 - 1, -1e4]])
    np.testing.assert_allclose(log_softmax(logits)[0, :2], [-0.3132617, -1.3132617], rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.floats(0, 0.5), st.integers(0, 99))
def test_quality_by_its_definition(rows: int, vocab: int, noise: float, seed: int) -> None:
    """More rows than are taken at once, in two calls."""
    reference = random_logits(rows, vocab, seed)
    ours = reference + random_logits(rows, vocab, seed + 100, noise)
    targets = np.random.default_rng(seed).integers(0, vocab, rows)
    distance = LogitsDistance()
    for part in (slice(0, rows // 2), slice(rows // 2, rows)):
        distance.add(ours[part], reference[part], targets[part])
    found = distance.quality()
    p, q, chosen = exact(reference), exact(ours), torch.from_numpy(targets)
    kl = (p.exp() * (p - q)).sum(-1)
    # Log-probabilities down to about −30 in float32.
    near = {"rel": 1e-5, "abs": 1e-5}
    assert found.tokens == rows
    assert np.log(found.perplexity) == pytest.approx(float(torch.nn.functional.nll_loss(q, chosen)), **near)
    assert np.log(found.reference_perplexity) == pytest.approx(
        float(torch.nn.functional.nll_loss(p, chosen)), **near
    )
    assert found.mean_kl == pytest.approx(float(kl.mean()), **near)
    assert found.p99_kl == pytest.approx(float(kl.quantile(0.99)), **near)
    assert found.top1_agreement == (reference.argmax(1) == ours.argmax(1)).mean()


def test_losses_and_divergences_of_each_row() -> None:
    reference, ours = log_softmax(random_logits(5, 70, 0)), log_softmax(random_logits(5, 70, 1))
    targets = np.array([0, 69, 3, 3, 12])
    assert token_losses(ours, targets).tolist() == [
        -float(row[t]) for row, t in zip(ours, targets, strict=True)
    ]
    expected = torch.nn.functional.kl_div(
        torch.from_numpy(ours), torch.from_numpy(reference), reduction="none", log_target=True
    ).sum(-1)
    np.testing.assert_allclose(kl_divergence(reference, ours), expected, rtol=1e-5)
    assert (kl_divergence(reference, reference) == 0).all()


def test_a_divergence_is_never_negative() -> None:
    """Rounding alone would put some of these below zero."""
    reference = random_logits(400, 500, 0)
    nearly = np.nextafter(reference, np.float32(np.inf))
    p, q = log_softmax(reference), log_softmax(nearly)
    assert ((np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64) < 0).any()
    assert (kl_divergence(p, q) >= 0).all()


def test_relative_error() -> None:
    reference = np.float32([[3, 4]])
    assert relative_error(np.float32([[3, 4.5]]), reference) == pytest.approx(0.1)
    assert relative_error(np.float32([[3, 4.5]]), reference, scale=np.float32([[0, 1]])) == 0.5
    nothing = np.zeros((1, 2), np.float32)
    assert relative_error(nothing, nothing) == 0
    assert relative_error(reference, nothing) == 1
