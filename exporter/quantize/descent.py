"""Coordinate descent on the output error of a weight that is already rounded.

Every group is visited in turn: its scale and minimum are fitted by least squares to the whole output error,
all else fixed, then its codes one by one (Behdin et al., "QuantEase", 2023). Each step lowers the error.
"""

import numpy as np

from pagelet.exporter.quantize.rounding import (
    Parameters,
    nearest_codes,
    restore,
    safe_divide,
    to_float16,
)
from pagelet.plugins.packing import Float32, LinearFormat


def group_parameters(parameters: Parameters, group: int) -> Parameters:
    """Those of one group, as views."""
    scales, minimums = parameters
    return scales[group], None if minimums is None else minimums[group]


def descend(
    columns: Float32,
    codes: Float32,
    parameters: Parameters,
    hessian: Float32,
    format: LinearFormat,
    sweeps: int,
) -> None:
    """Better codes f32 [K, N], zero point subtracted, and parameters [G, N], in place.

    `columns` f32 [K, N] are the weights, `hessian` f32 [K, K] is positive definite.
    """
    blocks = [slice(start, start + format.group_size) for start in range(0, len(columns), format.group_size)]
    restored = [restore(codes[block], group_parameters(parameters, g)) for g, block in enumerate(blocks)]
    errors = columns - np.concatenate(restored)
    for _ in range(sweeps):
        for group, block in enumerate(blocks):
            own, inside = group_parameters(parameters, group), hessian[block, block]
            pull = hessian[block] @ errors  # minus half the gradient
            _fit(codes[block], pull, inside, own)
            fitted = columns[block] - restore(codes[block], own)
            pull += inside @ (fitted - errors[block])
            values = columns[block] - fitted
            errors[block] = fitted - _round_again(values, codes[block], pull, inside, own, format)


def _fit(codes: Float32, pull: Float32, hessian: Float32, parameters: Parameters) -> None:
    """A group's parameters [N], in place, to the minimum for its codes f32 [g, N]; pull f32 [g, N] = H e.

    The minimum is rounded to FP16 before the scale is fitted. Where FP16 leaves no gain nothing changes.
    """
    scale, minimum = parameters
    coded = hessian @ codes
    curvature, slope = (codes * coded).sum(axis=0), (codes * pull).sum(axis=0)
    gain = np.zeros_like(scale)
    fitted_minimum = None
    if minimum is not None:
        total, mixed, total_slope = hessian.sum(), coded.sum(axis=0), pull.sum(axis=0)
        determinant = curvature * total - mixed * mixed
        step = safe_divide(curvature * total_slope - mixed * slope, determinant)
        fitted_minimum = to_float16(minimum + step)
        shift = fitted_minimum - minimum
        gain += shift * (2 * total_slope - shift * total)
        slope = slope - shift * mixed
    fitted = to_float16(scale + safe_divide(slope, curvature))
    change = fitted - scale
    gain += change * (2 * slope - change * curvature)
    np.copyto(scale, fitted, where=gain > 0)
    if minimum is not None and fitted_minimum is not None:
        np.copyto(minimum, fitted_minimum, where=gain > 0)


def _round_again(
    values: Float32,
    codes: Float32,
    pull: Float32,
    hessian: Float32,
    parameters: Parameters,
    format: LinearFormat,
) -> Float32:
    """Each code of a group f32 [g, N], in place, to its best; returns how the restored values changed."""
    changes = np.empty_like(values)
    for i in range(len(values)):
        target = values[i] + (pull[i] - hessian[i, :i] @ changes[:i]) / hessian[i, i]
        codes[i] = nearest_codes(target, parameters, format)
        changes[i] = restore(codes[i], parameters) - values[i]
    return changes
