"""AWQ: inputs that matter are scaled up before rounding, and down again where they come from.

Lin et al., "AWQ: activation-aware weight quantization", 2023: W x = (W · s) (x / s) for any s > 0 per input.
A group's rounding error is about the same for all its inputs, so one that is scaled up loses less.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.quantize.output_error import output_error
from pagelet.exporter.quantize.rounding import round_to_nearest
from pagelet.models.spec import ModelSpec
from pagelet.plugins.packing import Float32, LinearFormat, dequantize

Float64 = NDArray[np.float64]

# Denser near 0: where the rounding already knows what matters, little is left for the scales to do.
_EXPONENTS = (np.arange(20) / 20) ** 2
_BOUNDS = (1e-4, 1e4)
# What a candidate is tried on: rows spread over the weight, so many at most and so many weights in all.
_SAMPLE_ROWS = 1024
_SAMPLE = 1 << 17


def search_input_scales(
    weight: Float32, hessian: Float64, format: LinearFormat, *, shared: NDArray[np.integer] | None = None
) -> Float32:
    """Scales s f32 [K] under which rounding weight f32 [N, K] · s costs the outputs least.

    `hessian` f64 [K, K] is the mean of x xᵀ, of the inputs before they are divided by s. `shared` [K] is the
    index of the scale that each input takes (None: each its own); inputs that are copies of one channel, as
    under grouped-query attention, must share theirs. In the sample that is tried no scales are worse than 1.

    Raises ValueError for shapes that do not agree and for what `round_to_nearest` refuses.
    """
    width = weight.shape[1]
    shared = np.arange(width) if shared is None else shared
    if hessian.shape != (width, width) or shared.shape != (width,):
        raise ValueError(
            f"weight {weight.shape}, hessian {hessian.shape} and shared {shared.shape} do not agree: "
            "expected [N, K], [K, K] and [K]"
        )
    sample = _sample(weight)
    best = np.ones(width, np.float32)
    lowest = _error(sample, best, hessian, format)
    for scales in _candidates(weight, hessian.diagonal(), shared):
        error = _error(sample, scales, hessian, format)
        if error < lowest:
            best, lowest = scales, error
    return best


def _candidates(weight: Float32, mean_squares: Float64, shared: NDArray[np.integer]) -> Iterator[Float32]:
    """Powers of the inputs' magnitude, alone and against the weights' magnitude."""
    sizes = np.maximum(np.bincount(shared), 1)
    inputs = np.sqrt(np.bincount(shared, mean_squares) / sizes)
    weights = np.bincount(shared, np.abs(weight).mean(axis=0, dtype=np.float64)) / sizes
    live = (inputs > 0) & (weights > 0)
    if not live.any():
        return
    inputs, weights = np.where(live, inputs, 1), np.where(live, weights, 1)
    for exponent in _EXPONENTS:
        for scales in (inputs**exponent, inputs**exponent / weights ** (1 - exponent)):
            # Centred, so that FP16 holds the scales of the groups as well as before.
            centre = np.exp(np.log(scales[live]).mean())
            yield np.where(live, np.clip(scales / centre, *_BOUNDS), 1).astype(np.float32)[shared]


def _error(weight: Float32, scales: Float32, hessian: Float64, format: LinearFormat) -> float:
    """The output error of all rows; infinite where the scaled weight is beyond FP16."""
    importance = hessian.diagonal() / scales.astype(np.float64) ** 2
    scaled = weight * scales
    if np.abs(scaled).max() > np.finfo(np.float16).max:
        return np.inf
    restored = dequantize(*round_to_nearest(scaled, format, importance), format) / scales
    return float(output_error(weight, restored, hessian).sum())


def _sample(weight: Float32) -> Float32:
    rows = max(min(len(weight), _SAMPLE_ROWS, _SAMPLE // weight.shape[1]), 1)
    return weight[np.linspace(0, len(weight) - 1, rows).astype(np.intp)]


def foldable(spec: ModelSpec, layer: int) -> dict[str, str]:
    """Modules whose inputs can be scaled, those nearest the output first, and the roles that take it back.

    Only what computes an input linearly, for that module alone, can be divided by its scales.
    """
    at, norms = f"layers.{layer}.", spec.norms(layer)
    attention, mlp = at + "attention.norm", at + "mlp.norm"
    found = {}
    if not spec.layers[layer].experts:
        if spec.mlp.gated:
            found[at + "mlp.down"] = at + "mlp.up"
        if mlp in norms and spec.norm.weight:
            found[at + ("mlp.gate_up" if spec.mlp.gated else "mlp.up")] = mlp
    shared = spec.layers[layer].shares_cache or any(other.cache_of == layer for other in spec.layers)
    if not spec.attention.norm_values and not shared:
        found[at + "attention.o"] = at + "attention.v"
    if attention in norms and spec.norm.weight and spec.block != "parallel":
        found[at + "attention.qkv"] = attention
    return found
