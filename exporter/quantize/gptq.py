"""GPTQ: inputs are rounded one after another, and those still to come make up for the error so far.

Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained transformers", 2022.
With H = R Rᵀ, R upper triangular, and e = w - ŵ, a row's output error is eᵀ H e = |Rᵀ e|², and

    (Rᵀ e)ᵢ = Rᵢᵢ (tᵢ - ŵᵢ),   tᵢ = wᵢ + Σ_{j<i} eⱼ Rⱼᵢ / Rᵢᵢ.

So input i is rounded to the code nearest to the target tᵢ. These are the codes that the paper gets from a
Cholesky factor of H's inverse (Chee et al., "QuIP", 2023, theorem 6), without inverting anything.
"""

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.quantize.descent import descend, group_parameters
from pagelet.exporter.quantize.output_error import output_error
from pagelet.exporter.quantize.rounding import (
    Parameters,
    nearest_codes,
    restore,
    round_to_nearest,
    search_parameters,
)
from pagelet.plugins.packing import Float32, LinearFormat, Quantized, dequantize, quantize_rtn

Float64 = NDArray[np.float64]

# Rows at a time, the last ones padded: a product's rounding depends on its shape, a row's codes must not.
_TILE_ROWS = 512


class Gptq:
    """Rounds weights whose inputs have one Hessian.

    Attributes:
        dead_inputs: inputs that the calibration text never excites; their weights round to nearest.
    """

    def __init__(
        self,
        hessian: Float64,
        format: LinearFormat,
        *,
        damping: float = 0.01,
        desc_act: bool = False,
        sweeps: int = 3,
    ) -> None:
        """Factorize `hessian` f64 [K, K], the mean of x xᵀ over the calibration text's tokens.

        `damping` times the mean diagonal is added to the diagonal. `desc_act` rounds the inputs with the
        largest mean square first, with the scales of the uncompensated weights, so that groups stay together.
        `sweeps` of coordinate descent follow.

        Raises ValueError for a Hessian that is not square, not finite, or not positive definite even with a
        hundredfold damping.
        """
        _check(hessian, format)
        self._hessian, self._format = hessian, format
        self._desc_act, self._sweeps = desc_act, sweeps
        self._importance = np.maximum(hessian.diagonal(), 0)
        dead = self._importance == 0
        self.dead_inputs = int(dead.sum())
        inputs = np.arange(len(hessian))
        self._order = np.argsort(-self._importance, kind="stable") if desc_act else inputs
        damped, factor = _factorize(hessian, dead, self._order, damping)
        self._damped = damped.astype(np.float32)
        self._feedback = (factor.T / factor.diagonal()[:, None]).astype(np.float32)

    def __call__(self, weight: Float32) -> Quantized:
        """Weight f32 [n, K] to codes, scales and minimums; any number of rows, each by itself.

        No row's output error is above that of `round_to_nearest` or `quantize_rtn`.
        """
        width = len(self._hessian)
        if weight.ndim != 2 or weight.shape[1] != width or len(weight) == 0:
            raise ValueError(f"weight has shape {weight.shape}, expected [n, {width}] with n > 0")
        tiles = [self._tile(weight[row : row + _TILE_ROWS]) for row in range(0, len(weight), _TILE_ROWS)]
        codes, scales, minimums = zip(*tiles, strict=True)
        if not self._format.asymmetric:
            return np.concatenate(codes), np.concatenate(scales), None
        return np.concatenate(codes), np.concatenate(scales), np.concatenate(minimums)

    def _tile(self, weight: Float32) -> Quantized:
        rows = len(weight)
        padded = np.pad(weight.astype(np.float32, copy=False), ((0, _TILE_ROWS - rows), (0, 0)))
        plain = quantize_rtn(padded, self._format)
        columns = np.ascontiguousarray(padded.T)
        codes, parameters = self._round(columns)
        descend(columns, codes, parameters, self._damped, self._format, self._sweeps)
        compensated = _by_rows(codes, parameters, self._format)
        nearest = round_to_nearest(padded, self._format, self._importance)
        return self._best(padded, [compensated, nearest, plain], rows)

    def _round(self, columns: Float32) -> tuple[Float32, Parameters]:
        """Codes f32 [K, N], zero point subtracted, and parameters [G, N] of weights f32 [K, N]."""
        size, format = self._format.group_size, self._format
        codes, errors = np.empty_like(columns), np.empty_like(columns)
        parameters = self._static_parameters(columns)
        for start in range(0, len(columns), size):
            block = slice(start, start + size)
            inputs, feedback = self._order[block], self._feedback[block]
            drift = feedback[:, :start] @ errors[:start]
            targets = columns[inputs] + drift
            if not self._desc_act:
                # The targets if this group were then rounded without error.
                compensated = columns[inputs] + np.linalg.solve(feedback[:, block], drift)
                found = search_parameters(compensated[None], self._importance[None, block], format)
                for values, new in zip(parameters, found, strict=True):
                    if values is not None and new is not None:
                        values[start // size] = new
            for i, k in enumerate(inputs):
                own = group_parameters(parameters, k // size)
                target = targets[i] + feedback[i, start : start + i] @ errors[start : start + i]
                codes[k] = nearest_codes(target, own, format)
                errors[start + i] = columns[k] - restore(codes[k], own)
        return codes, parameters

    def _static_parameters(self, columns: Float32) -> Parameters:
        """Those of the weights themselves, or room for those that are found on the way."""
        groups, rows = self._format.groups(len(columns)), columns.shape[1]
        if not self._desc_act:
            scales = np.empty((groups, rows), np.float32)
            return scales, np.empty_like(scales) if self._format.asymmetric else None
        importance = self._importance.reshape(groups, -1)
        return search_parameters(columns.reshape(groups, -1, rows), importance, self._format)

    def _best(self, weight: Float32, candidates: list[Quantized], rows: int) -> Quantized:
        """For each of the first `rows` the candidate with the lowest output error."""
        restored = [dequantize(*parts, self._format)[:rows] for parts in candidates]
        errors = [output_error(weight[:rows], values, self._hessian) for values in restored]
        best, row = np.argmin(errors, axis=0), np.arange(rows)
        codes = np.stack([parts[0] for parts in candidates])[best, row]
        scales = np.stack([parts[1] for parts in candidates])[best, row]
        minimums = [parts[2] for parts in candidates if parts[2] is not None]
        return codes, scales, np.stack(minimums)[best, row] if minimums else None


def _by_rows(codes: Float32, parameters: Parameters, format: LinearFormat) -> Quantized:
    """Codes f32 [K, N], zero point subtracted, and parameters [G, N] as the packer takes them."""
    code_type = np.uint8 if format.bits == 4 else np.int8
    scales, minimums = (None if part is None else part.T.astype(np.float16) for part in parameters)
    assert scales is not None
    return (codes.T + np.float32(format.zero_point)).astype(code_type), scales, minimums


def _check(hessian: Float64, format: LinearFormat) -> None:
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1]:
        raise ValueError(f"hessian has shape {hessian.shape}, expected [K, K]")
    format.groups(len(hessian))
    if not np.isfinite(hessian).all():
        raise ValueError("hessian holds NaN or infinity: calibrate with other text or use --quantizer rtn")


def _factorize(
    hessian: Float64, dead: NDArray[np.bool_], order: NDArray[np.intp], damping: float
) -> tuple[Float64, Float64]:
    """The damped Hessian, and upper triangular R with R Rᵀ = it, rows and columns in `order`."""
    mean = 1.0 if dead.all() else float(hessian.diagonal()[~dead].mean())
    reverse = order[::-1]  # Cholesky starts with the first input, R with the last
    for times in (1, 10, 100):
        damped = np.where(dead[:, None] | dead, 0, hessian)
        damped[np.diag_indices_from(damped)] += np.where(dead, mean, times * damping * mean)
        try:
            lower = np.linalg.cholesky(damped[reverse][:, reverse])
        except np.linalg.LinAlgError:
            continue
        return damped, lower[::-1, ::-1]
    raise ValueError(
        f"hessian is not positive definite, even with {100 * damping:g} of its mean diagonal added to it: "
        "calibrate with more text or use --quantizer rtn"
    )
