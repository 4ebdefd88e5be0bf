"""The search for input scales: never worse, bounded, shared, and exact when folded."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagelet.exporter.quantize.awq import search_input_scales
from pagelet.exporter.quantize.output_error import output_error
from pagelet.exporter.quantize.rounding import round_to_nearest
from pagelet.plugins.packing import LinearFormat, dequantize

FORMATS = [LinearFormat(4, 32, False), LinearFormat(4, 64, True), LinearFormat(8, 32, False)]


def problem(seed: int, size: int = 128) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """A weight, and the Hessian of correlated inputs of which a few are far larger than the others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((400, size // 4)) @ rng.standard_normal((size // 4, size))
    x += rng.standard_normal(x.shape)
    x[:, rng.choice(size, 3, replace=False)] *= 20
    return (0.05 * rng.standard_t(5, (24, size))).astype(np.float32), x.T @ x / len(x)


def cost(
    weight: NDArray[np.float32],
    hessian: NDArray[np.float64],
    format: LinearFormat,
    scales: NDArray[np.float32],
) -> float:
    importance = hessian.diagonal() / scales.astype(np.float64) ** 2
    restored = dequantize(*round_to_nearest(weight * scales, format, importance), format) / scales
    return float(output_error(weight, restored, hessian).sum())


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(FORMATS))
def test_scales_are_bounded_and_never_worse_than_none(seed: int, format: LinearFormat) -> None:
    weight, hessian = problem(seed)
    scales = search_input_scales(weight, hessian, format)
    assert scales.dtype == np.float32
    assert scales.shape == (128,)
    assert ((scales >= 1e-4) & (scales <= 1e4)).all()
    assert cost(weight, hessian, format, scales) <= cost(weight, hessian, format, np.ones(128, np.float32))


def test_large_inputs_are_scaled_up_and_that_pays() -> None:
    weight, hessian = problem(1)
    format = LinearFormat(4, 32, False)
    scales = search_input_scales(weight, hessian, format)
    large = np.argsort(hessian.diagonal())[-3:]
    assert scales[large].min() > np.median(scales)
    # Seen: 0.8.
    assert cost(weight, hessian, format, scales) < 0.95 * cost(weight, hessian, format, np.ones_like(scales))


def test_inputs_that_share_a_scale_get_one() -> None:
    """Two heads of 32 channels read each of two value heads."""
    weight, hessian = problem(2)
    format = LinearFormat(4, 32, False)
    shared = np.concatenate([np.arange(32), np.arange(32), 32 + np.arange(32), 32 + np.arange(32)])
    scales = search_input_scales(weight, hessian, format, shared=shared)
    assert len(np.unique(scales)) > 1
    np.testing.assert_array_equal(scales[:32], scales[32:64])
    np.testing.assert_array_equal(scales[64:96], scales[96:])
    assert cost(weight, hessian, format, scales) <= cost(weight, hessian, format, np.ones_like(scales))


def test_dead_inputs_keep_theirs() -> None:
    weight, hessian = problem(3)
    dead = [0, 40, 127]
    hessian[dead, :] = 0
    hessian[:, dead] = 0
    scales = search_input_scales(weight, hessian, LinearFormat(4, 32, False))
    np.testing.assert_array_equal(scales[dead], 1)
    assert len(np.unique(scales)) > 1
    none = search_input_scales(weight, np.zeros_like(hessian), LinearFormat(4, 32, False))
    np.testing.assert_array_equal(none, 1)


def test_folded_scales_cancel() -> None:
    """(W s)(x / s) is W x: each product differs by three roundings of float64."""
    weight, hessian = problem(4)
    scales = search_input_scales(weight, hessian, LinearFormat(4, 32, False)).astype(np.float64)
    assert len(np.unique(scales)) > 1
    x = np.random.default_rng(5).standard_normal(128)
    expected = weight.astype(np.float64) @ x
    np.testing.assert_allclose((weight * scales) @ (x / scales), expected, rtol=0, atol=1e-12)


def test_extreme_magnitudes_stay_within_bounds_and_fp16() -> None:
    weight, hessian = problem(6)
    spread = np.logspace(-12, 12, 128)
    scales = search_input_scales(weight * np.float32(1000), hessian * np.outer(spread, spread), FORMATS[0])
    assert ((scales >= 1e-4) & (scales <= 1e4)).all()
    assert np.abs(weight * 1000 * scales).max() <= 65504


def test_shapes_are_checked() -> None:
    weight, hessian = problem(7)
    with pytest.raises(ValueError, match="do not agree"):
        search_input_scales(weight, hessian[:64, :64], FORMATS[0])
    with pytest.raises(ValueError, match="do not agree"):
        search_input_scales(weight, hessian, FORMATS[0], shared=np.arange(64))
