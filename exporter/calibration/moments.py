"""Second moments of what a layer's linear layers read: their Hessians, up to a factor."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.calibration.attention_mass import attention_mass
from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.graph_layer import fused_norm
from pagelet.exporter.layerwise import Taps
from pagelet.exporter.stacked_rows import read_finite
from pagelet.exporter.stream import Float32
from pagelet.models.errors import CheckpointError
from pagelet.models.spec import ModelSpec

Float64 = NDArray[np.float64]


class LayerMoments:
    """Mean of x xᵀ over all tokens, float64 [in, in], of what each of a layer's modules reads.

    The squared error of a linear layer's outputs, averaged over tokens, is Δw H Δwᵀ of each row
    of its weight. For q, k and v a token counts one, and once more as it is attended to.
    """

    def __init__(self, spec: ModelSpec, layer: int, weights: Mapping[str, Float32]) -> None:
        """`weights`: as `small_weights` reads them."""
        self._spec = spec
        self._layer = layer
        self._weights = weights
        self._sums: dict[str, Float64] = {}
        self._count = 0

    def add(self, taps: Taps, lengths: Sequence[int]) -> None:
        """One run's taps over texts of `lengths` (`Layerwise.layer`)."""
        self._count += len(taps["attended"])
        counts = 1 + attention_mass(self._spec, self._layer, taps["qkv"], lengths, self._weights)
        normed = self._read("attention.qkv", taps["attention_in"])
        self._add("attention.qkv", normed * np.sqrt(counts / 2).astype(np.float32)[:, None])
        self._add("attention.o", taps["attended"])
        if not self._spec.layers[self._layer].experts:
            module = "mlp.gate_up" if self._spec.mlp.gated else "mlp.up"
            self._add(module, self._read(module, taps["mlp_in"]))
            self._add("mlp.down", taps["gated"])
        if self._spec.layer_inputs:
            self._add("inputs.gate", taps["inputs_in"])
            self._add("inputs.projection", taps["inputs_gated"])

    def _read(self, module: str, x: Float32) -> Float32:
        role = fused_norm(self._spec, self._layer, module)
        return rms_norm(x, self._weights[role], self._spec.norm.epsilon) if role else x

    def hessian(self, module: str) -> Float64:
        """Of a module, "attention.o" say.

        Raises:
            CheckpointError: the layer computes NaN or infinity, or numbers whose squares are.
        """
        hessian = self._sums[module] / self._count
        if not np.isfinite(hessian).all():
            raise CheckpointError(
                f"layers.{self._layer}.{module} reads NaN, infinity or numbers beyond 1e19 on the "
                "calibration text: the weights before it are damaged, or too large to be quantized."
            )
        return hessian

    def _add(self, module: str, x: Float32) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # `hessian` reports it
            products = (x.T @ x).astype(np.float64)
            self._sums[module] = self._sums.get(module, 0.0) + products


def head_hessian(checkpoint: Checkpoint, spec: ModelSpec, residual: Float32) -> Float64:
    """That of the head, float64 [hidden, hidden]; `residual` [tokens, hidden]: behind the last layer."""
    normed = final_norm(checkpoint, spec, residual)
    hessian: Float64 = (normed.T @ normed).astype(np.float64) / len(normed)
    return hessian


def small_weights(checkpoint: Checkpoint, spec: ModelSpec, layer: int) -> dict[str, Float32]:
    """By role: the norms that are part of a layer's linear layers, those of queries and keys, and sinks."""
    roles = {fused_norm(spec, layer, module) for module in ("attention.qkv", "mlp.up")} - {""}
    ones = np.ones(spec.hidden_size, np.float32)
    found = {
        role: read_finite(checkpoint, role + ".weight") if spec.norm.weight else ones
        for role in sorted(roles)
    }
    of_heads = [
        f"layers.{layer}.attention.{name}" for name in ("q_norm.weight", "k_norm.weight", "sinks.values")
    ]
    present = [name for name in of_heads if name in checkpoint.weights]
    return found | {name.rpartition(".")[0]: read_finite(checkpoint, name) for name in present}


def final_norm(checkpoint: Checkpoint, spec: ModelSpec, x: Float32) -> Float32:
    """What the head reads of the residual stream x [T, hidden]."""
    weight = read_finite(checkpoint, "final_norm.weight") if spec.norm.weight else np.float32(1)
    if spec.norm.type == "rms":
        return rms_norm(x, weight, spec.norm.epsilon)
    centred = rms_norm(x - x.mean(axis=1, keepdims=True), weight, spec.norm.epsilon)
    return centred + read_finite(checkpoint, "final_norm.bias") if spec.norm.bias else centred


def rms_norm(x: Float32, weight: Float32 | np.float32, epsilon: float) -> Float32:
    """x [T, K] / sqrt(mean(x²) + epsilon) · weight [K]; Zhang and Sennrich, 2019."""
    scale = 1 / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + np.float32(epsilon))
    normed: Float32 = x * scale * weight
    return normed
