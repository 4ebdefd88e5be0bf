"""Rounding to the nearest code, with the scale and minimum of each group that lose least.

Plain rounding stretches the codes over a group's whole range. Here the range is also cut, and every cut is
followed by a weighted least-squares fit of scale and minimum to the codes it gave; the best of all is kept.

Weights are held with their inputs first, as groups f32 [G, group_size, N]: a group's parameters are rows of
N, its sums are products with the importance, and every operation runs along contiguous memory.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pagelet.plugins.packing import Float32, LinearFormat, Quantized, dequantize, quantize_rtn

# Scales and, if asymmetric, minimums: f32 that FP16 holds exactly, with the groups' shape but for group_size.
Parameters = tuple[Float32, Float32 | None]

# Where a range is cut. Symmetric: the code that the farthest value would get if there were one.
_INT4_REACHES = (8, 7, 7.5, 8.5, 9, 9.5, 10, 10.75, 11.5, 12.5, 13.75, 15.5)
_INT8_REACHES = (127, *range(118, 160, 2))
# Asymmetric: shares of the range, below and above.
_CUTS = (0, 0.03, 0.07, 0.12, 0.18)
# Fits to the best cut's codes, each to those that the fit before it gave; later ones change next to nothing.
_REFITS = 2
# Floats of a tile: it and its temporaries stay in the cache.
_TILE = 1 << 16
_TILE_ROWS = 2048


def round_to_nearest(
    weight: Float32, format: LinearFormat, importance: NDArray[np.floating] | None = None
) -> Quantized:
    """Weight f32 [N, K] to codes, scales and minimums, each group with the parameters that lose least.

    `importance` [K] is the mean square of each input (None: all alike). No group's sum of
    importance · (w - ŵ)² is above that of `quantize_rtn`.

    Raises ValueError for what `quantize_rtn` refuses, and an importance that is not K finite numbers >= 0.
    """
    plain = quantize_rtn(weight, format)
    rows, groups = len(weight), format.groups(weight.shape[1])
    importance = _checked(importance, weight.shape[1]).reshape(groups, format.group_size)
    by_group = weight.astype(np.float32, copy=False).T.reshape(groups, format.group_size, rows)
    codes = np.empty(by_group.shape, plain[0].dtype)
    scales = np.empty((groups, rows), np.float16)
    minimums = np.empty((groups, rows), np.float16) if format.asymmetric else None
    for tile in _tiles(groups, rows, format.group_size):
        values = np.ascontiguousarray(by_group[tile[0], :, tile[1]])
        found = search_parameters(values, importance[tile[0]], format)
        by_value = found[0][:, None], None if found[1] is None else found[1][:, None]
        codes[tile[0], :, tile[1]] = nearest_codes(values, by_value, format) + format.zero_point
        scales[tile] = found[0]
        if minimums is not None and found[1] is not None:
            minimums[tile] = found[1]
    columns = codes.reshape(weight.shape[::-1])
    searched = columns.T.copy(), scales.T.copy(), None if minimums is None else minimums.T.copy()
    return _better_groups(weight, searched, plain, importance.reshape(-1), format)


def search_parameters(values: Float32, importance: NDArray[np.float64], format: LinearFormat) -> Parameters:
    """Parameters [G, N] that lose least for groups f32 [G, group_size, N], importance f64 [G, group_size]."""
    importance = np.where(importance.max(axis=1, keepdims=True) > 0, importance, 1)
    relative = (importance / importance.max(axis=1, keepdims=True)).astype(np.float32)[:, None, :]
    best: Parameters | None = None
    lowest = np.full((len(values), 1, values.shape[2]), np.inf, np.float32)
    for start in _starts(values, format):
        best, lowest = _keep_better(best, lowest, *_refit(values, relative, start, format))
    assert best is not None
    for _ in range(_REFITS):
        best, lowest = _keep_better(best, lowest, *_refit(values, relative, best, format))
    return best[0][:, 0], None if best[1] is None else best[1][:, 0]


def nearest_codes(values: Float32, parameters: Parameters, format: LinearFormat) -> Float32:
    """The nearest codes, zero point subtracted, to values f32 [..., N] under parameters f32 [..., N]."""
    scale, minimum = parameters
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = values * inverse if minimum is None else (values - minimum) * inverse
    np.rint(codes, out=codes)
    return np.clip(codes, *code_limits(format), out=codes)


def restore(codes: Float32, parameters: Parameters) -> Float32:
    """The values of codes f32 [..., N] whose zero point is subtracted."""
    scale, minimum = parameters
    values = codes * scale
    if minimum is not None:
        values += minimum
    return values


def code_limits(format: LinearFormat) -> tuple[int, int]:
    """The lowest and highest code, zero point subtracted."""
    if format.bits == 8:
        return -127, 127
    return -format.zero_point, 15 - format.zero_point


def to_float16(values: Float32) -> Float32:
    """The nearest numbers that FP16 holds."""
    largest = np.float32(np.finfo(np.float16).max)
    return np.clip(values, -largest, largest).astype(np.float16).astype(np.float32)


def safe_divide(numerator: Float32, denominator: Float32) -> Float32:
    """The quotient; 0 where the denominator is."""
    zeros = np.zeros(np.broadcast_shapes(numerator.shape, denominator.shape), np.float32)
    return np.divide(numerator, denominator, out=zeros, where=denominator != 0)


def _starts(values: Float32, format: LinearFormat) -> Iterator[Parameters]:
    """Parameters for each way to cut the range; plain rounding's first."""
    low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    if format.asymmetric:
        span = high - low
        for below in _CUTS:
            for above in _CUTS:
                scale = to_float16(span * np.float32((1 - below - above) / 15))
                yield scale, to_float16(low + np.float32(below) * span)
    else:
        farthest = np.where(high > -low, high, low)
        for reach in _INT4_REACHES if format.bits == 4 else _INT8_REACHES:
            scale = to_float16(farthest / np.float32(reach))
            yield -scale, None
            if format.bits == 4:  # the other way round, the other side reaches one code farther
                yield scale, None


def _refit(
    values: Float32, importance: Float32, parameters: Parameters, format: LinearFormat
) -> tuple[Parameters, Float32]:
    """Parameters fitted by least squares to the codes that `parameters` give, and the error with these.

    The sums are of the residuals, and so the difference to `parameters` is what is fitted: sums of the values
    themselves would cancel in float32.
    """
    scale, minimum = parameters
    codes = nearest_codes(values, parameters, format)
    residuals = values - restore(codes, parameters)
    code_square, code_residual = importance @ (codes * codes), importance @ (codes * residuals)
    error = importance @ (residuals * residuals)
    if minimum is None:
        fitted = to_float16(scale + safe_divide(code_residual, code_square))
        change = fitted - scale
        return (fitted, None), error + change * (change * code_square - 2 * code_residual)
    weight, code, residual = importance.sum(axis=2, keepdims=True), importance @ codes, importance @ residuals
    fitted_minimum = to_float16(
        minimum
        + safe_divide(code_square * residual - code * code_residual, weight * code_square - code * code)
    )
    shift = fitted_minimum - minimum
    fitted = to_float16(scale + safe_divide(code_residual - shift * code, code_square))
    change = fitted - scale
    error = error + shift * (shift * weight - 2 * residual)
    error += change * (change * code_square - 2 * (code_residual - shift * code))
    return (fitted, fitted_minimum), error


def _keep_better(
    best: Parameters | None, lowest: Float32, found: Parameters, error: Float32
) -> tuple[Parameters, Float32]:
    if best is None:
        return found, error
    better = error < lowest
    scale = np.where(better, found[0], best[0])
    minimum = None
    if found[1] is not None and best[1] is not None:
        minimum = np.where(better, found[1], best[1])
    return (scale, minimum), np.where(better, error, lowest)


def _better_groups(
    weight: Float32,
    searched: Quantized,
    plain: Quantized,
    importance: NDArray[np.float64],
    format: LinearFormat,
) -> Quantized:
    """`searched`, but `plain` in the groups where that is at least as good; in float64."""
    errors = [group_errors(weight, parts, importance, format) for parts in (searched, plain)]
    better = errors[0] < errors[1]
    by_input = np.repeat(better, format.group_size, axis=1)
    codes = np.where(by_input, searched[0], plain[0])
    minimums = None
    if searched[2] is not None and plain[2] is not None:
        minimums = np.where(better, searched[2], plain[2])
    return codes, np.where(better, searched[1], plain[1]), minimums


def group_errors(
    weight: Float32, parts: Quantized, importance: NDArray[np.float64], format: LinearFormat
) -> NDArray[np.float64]:
    """The sums of importance · (w - ŵ)² of each group, f64 [N, K/group_size]."""
    groups = format.groups(weight.shape[1])
    differences = (weight - dequantize(*parts, format)).reshape(len(weight), groups, -1)
    by_group = importance.reshape(groups, format.group_size)
    errors: NDArray[np.float64] = np.einsum("ngk,ngk,gk->ng", differences, differences, by_group)
    return errors


def _checked(importance: NDArray[np.floating] | None, width: int) -> NDArray[np.float64]:
    if importance is None:
        return np.ones(width)
    if importance.shape != (width,) or not np.isfinite(importance).all() or (importance < 0).any():
        raise ValueError(
            f"importance has shape {importance.shape} or a number that is negative or not finite, "
            f"expected the mean squares of {width} inputs: calibrate with more or other text"
        )
    return importance.astype(np.float64)


def _tiles(groups: int, rows: int, group_size: int) -> Iterator[tuple[slice, slice]]:
    """Slices of groups and rows that hold about _TILE floats."""
    row_step = min(rows, _TILE_ROWS)
    group_step = max(_TILE // (group_size * row_step), 1)
    for group in range(0, groups, group_step):
        for row in range(0, rows, row_step):
            yield slice(group, group + group_step), slice(row, row + row_step)
