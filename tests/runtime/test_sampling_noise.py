"""The noise: a pure function of its four keys, uniform, and without visible structure between them.

All draws are fixed by their seeds. A statistic is compared with its expectation at 5 standard deviations,
which a good generator exceeds once in two million.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagelet.runtime.sampling.noise import exponential, gumbel, mix64, row_key, token_bits

IDS = np.arange(50_000, dtype=np.uint32)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 49_999), min_size=1, max_size=50))
def test_a_tokens_noise_does_not_depend_on_which_others_are_asked_for(key: int, ids: list[int]) -> None:
    chosen = np.array(ids, np.uint32)
    assert np.array_equal(gumbel(key, chosen), gumbel(key, IDS)[chosen])


def test_every_part_of_the_key_counts() -> None:
    keys = [row_key(*parts) for parts in itertools.product([0, 1, 2**63], [0, 1, 2], [0, 1, 2, 1000])]
    assert len(set(keys)) == len(keys)
    assert row_key(1, 0, 5) != row_key(0, 1, 5) != row_key(0, 5, 1)


def test_mix64_is_the_published_finalizer() -> None:
    # First outputs of the reference splitmix64.c for the state 1234567: the state grows by the golden gamma.
    golden = 0x9E3779B97F4A7C15
    outputs = [mix64(1234567 + step * golden) for step in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("axis", ["token", "position", "sample", "seed"])
def test_bits_are_uniform_along_every_axis(axis: str) -> None:
    if axis == "token":
        bits = token_bits(row_key(7, 0, 0), IDS)
    else:
        keys = {
            "position": [row_key(7, 0, i) for i in range(20_000)],
            "sample": [row_key(7, i, 0) for i in range(20_000)],
            "seed": [row_key(i, 0, 0) for i in range(20_000)],
        }[axis]
        bits = np.concatenate([token_bits(key, IDS[17:18]) for key in keys])
    for shift in (24, 12, 0):  # the high, middle and low byte
        counts = np.bincount((bits >> np.uint32(shift)) & np.uint32(255), minlength=256)
        chi_square = ((counts - bits.size / 256) ** 2 / (bits.size / 256)).sum()
        assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)


def test_neighbours_are_not_correlated() -> None:
    rows = [
        exponential(token_bits(row_key(seed, sample, position), IDS))
        for seed, sample, position in [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]
    ]
    bound = 5 / np.sqrt(IDS.size)
    for a, b in itertools.combinations(rows, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < bound
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(rows[0][lag:], rows[0][:-lag])[0, 1]) < bound


def test_the_variates_have_their_distributions() -> None:
    noise = np.concatenate([gumbel(row_key(3, 0, position), IDS) for position in range(20)])
    deviations = 5 / np.sqrt(noise.size)
    assert abs(noise.mean() - np.euler_gamma) < deviations * np.pi / np.sqrt(6)
    # Var of the sample variance of a Gumbel: (kurtosis 5.4 - 1) * variance**2 / n.
    assert abs(noise.var() - np.pi**2 / 6) < deviations * np.sqrt(4.4) * np.pi**2 / 6


def test_the_extremes_are_finite_and_exponential_is_never_below_its_uniform() -> None:
    bits = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    arrivals = exponential(bits)
    assert np.isfinite(np.log(arrivals)).all()
    assert (arrivals >= bits * 2.0**-32).all()
