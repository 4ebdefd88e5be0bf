"""What a weight's rounding does to its layer's output."""

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

# Rows at a time; bounds the float64 copies.
_ROWS = 512


def output_error(weight: Float32, restored: Float32, hessian: Float64) -> Float64:
    """The mean squared error of each output, f64 [N], for weights f32 [N, K] and `hessian` f64 [K, K].

    With e = weight - restored and hessian = mean of x xᵀ over the calibration text, it is eᵀ hessian e.
    Float64, because the errors of correlated inputs cancel almost entirely.
    """
    errors = np.empty(len(weight))
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        difference = weight[rows].astype(np.float64) - restored[rows]
        errors[rows] = ((difference @ hessian) * difference).sum(axis=1)
    return np.maximum(errors, 0)  # a sum of squares, but for rounding
