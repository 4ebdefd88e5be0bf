"""Searched rounding against plain rounding, group by group, and where exact answers are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagelet.exporter.quantize.rounding import group_errors, round_to_nearest
from pagelet.plugins.packing import LinearFormat, dequantize, pack, quantize_rtn

FORMATS = [
    LinearFormat(bits, group_size, asymmetric)
    for bits, asymmetric in ((4, False), (4, True), (8, False))
    for group_size in (32, 64, 128)
]
# Between two orders of summation in float64.
SUMMATION = 1e-12


@st.composite
def weights(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.float64] | None, LinearFormat]:
    """Heavy tails, offsets, zero and constant groups, sizes from FP16's smallest to its largest."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 20)), 128 * draw(st.integers(1, 2)))
    weight = rng.standard_t(2, shape).clip(-50, 50) + draw(st.sampled_from([0, 0, 0.5, 30]))
    if draw(st.booleans()):
        weight[:, :32] = draw(st.sampled_from([0, 1, -3.7]))
    weight = (weight * draw(st.sampled_from([1e-9, 1e-5, 0.03, 1, 500]))).astype(np.float32)
    kind = draw(st.sampled_from(["none", "heavy", "sparse", "zero"]))
    importance = {
        "none": None,
        "heavy": np.exp(rng.normal(0, 3, shape[1])),
        "sparse": np.where(rng.random(shape[1]) < 0.1, 1e6, 0),
        "zero": np.zeros(shape[1]),
    }[kind]
    return weight, importance, draw(st.sampled_from(FORMATS))


@settings(max_examples=60, deadline=None)
@given(weights())
def test_no_group_is_worse_than_plain_rounding(
    case: tuple[NDArray[np.float32], NDArray[np.float64] | None, LinearFormat],
) -> None:
    weight, importance, format = case
    found = round_to_nearest(weight, format, importance)
    pack(*found, format)  # raises for shapes, dtypes and values that the format can't hold
    by_input = np.ones(weight.shape[1]) if importance is None else importance
    ours, plain = (group_errors(weight, q, by_input, format) for q in (found, quantize_rtn(weight, format)))
    assert (ours <= plain * (1 + SUMMATION)).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_weights_with_inputs_that_matter_gain_much(format: LinearFormat) -> None:
    """The error falls to less than 0.8 of plain rounding's: seen are 0.2 to 0.7."""
    rng = np.random.default_rng(3)
    weight = rng.standard_t(4, (64, 256)).astype(np.float32)
    importance = np.exp(rng.normal(0, 1.5, 256))
    ours, plain = (
        group_errors(weight, parts, importance, format).sum()
        for parts in (round_to_nearest(weight, format, importance), quantize_rtn(weight, format))
    )
    assert ours < 0.8 * plain


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_weights_on_the_grid_come_back_exactly(format: LinearFormat) -> None:
    rng = np.random.default_rng(5)
    low, high = (-127, 128) if format.bits == 8 else (0, 16)
    codes = rng.integers(low, high, (48, 256)).astype(np.int8 if format.bits == 8 else np.uint8)
    codes[:, :: format.group_size] = low
    codes[:, 1 :: format.group_size] = high - 1
    groups = 256 // format.group_size
    scales = np.exp(rng.normal(-4, 1, (48, groups))).astype(np.float16)
    minimums = rng.normal(0, 0.1, (48, groups)).astype(np.float16) if format.asymmetric else None
    weight = dequantize(codes, scales, minimums, format)
    importance = np.exp(rng.normal(0, 2, 256))
    np.testing.assert_array_equal(dequantize(*round_to_nearest(weight, format, importance), format), weight)


def test_groups_with_a_zero_point_keep_their_steps() -> None:
    """w = s (q - 3), as asymmetric checkpoints have it; -3 s has to be rounded to FP16 first."""
    rng = np.random.default_rng(7)
    format = LinearFormat(4, 32, asymmetric=True)
    codes = rng.integers(0, 16, (16, 64))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scales = np.exp(rng.normal(-4, 1, (16, 2))).astype(np.float16).astype(np.float32)
    weight = ((codes - 3) * np.repeat(scales, 32, axis=1)).astype(np.float32)
    found = round_to_nearest(weight, format)
    np.testing.assert_array_equal(found[0], codes)
    # Half a unit in FP16's last place, 2^-11, of a minimum of three steps, and of a scale times 15.
    bound = np.repeat(scales, 32, axis=1) * (3 + 15) * 2.0**-11
    assert (np.abs(dequantize(*found, format) - weight) <= bound).all()


def test_rows_do_not_depend_on_one_another() -> None:
    """In blocks of one size; a tile's products may round differently, and then so may a tie."""
    rng = np.random.default_rng(9)
    format = LinearFormat(4, 32, asymmetric=True)
    weight = rng.standard_normal((64, 128)).astype(np.float32)
    order = rng.permutation(64)
    whole, shuffled = round_to_nearest(weight, format), round_to_nearest(weight[order], format)
    for a, b in zip(whole, shuffled, strict=True):
        assert a is not None
        assert b is not None
        np.testing.assert_array_equal(a[order], b)


@pytest.mark.parametrize("importance", [np.ones(31), np.full(32, np.nan), -np.ones(32)], ids=str)
def test_importance_is_checked(importance: NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match="importance has shape"):
        round_to_nearest(np.ones((1, 32), np.float32), LinearFormat(4, 32), importance)


def test_damaged_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        round_to_nearest(np.full((1, 32), np.nan, np.float32), LinearFormat(4, 32))
