"""Weights out of the CPU's packed form into a GPU target's file: the same codes, in another order.

So every target has what the quantizer chose and wrote, one matrix in memory at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.stacked_rows import Float32
from pagelet.exporter.targets.gpu_builder import LOWERED_NAME, TABLE
from pagelet.exporter.weights import WEIGHTS_NAME, Linear, StoredTensor, StoredWeights, WeightsFile
from pagelet.models.errors import UnsupportedError
from pagelet.models.spec import ModelSpec
from pagelet.plugins import float_packing, packing
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import TILE_COLUMNS, LinearFormat

GATHERED = ("embedding", "layer_inputs.table")
"""Modules whose rows are looked up by token."""
_TYPES: dict[str, tuple[str, type[np.generic]]] = {
    "f16": ("float16", np.float16),
    "bf16": ("bfloat16", ml_dtypes.bfloat16),
    "f32": ("float32", np.float32),
}
T = TypeVar("T", bound=np.generic)
_VECTOR = np.dtype("<f4")


@dataclass(frozen=True)
class Laid:
    """An array as it goes into the file: `dtype` of `StoredTensor`, and the shape that the graph sees."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.generic]


class Layout(Protocol):
    """How a target's ops want quantized weights."""

    def integers(
        self, codes: packing.Codes, scales: Float32, format: LinearFormat, half: type[np.generic]
    ) -> tuple[Laid, Laid]:
        """Codes [out, in] as `plugins.packing` has them, symmetric, and float32 scales [out, groups].

        `half`: the type of the activations.
        """

    def fp8(self, codes: NDArray[np.uint8], scales: Float32, half: type[np.generic]) -> tuple[Laid, Laid]:
        """Codes E4M3 [out, in], float32 scales [out, 1]."""


def lower_weights(
    spec: ModelSpec,
    stored: StoredWeights,
    folder: Path,
    layout: Layout,
    *,
    activations: str,
    input_scales: Mapping[str, float],
) -> StoredWeights:
    """Write `folder`/model.data from `folder`/model.weights.

    Args:
        activations: "f16", "bf16" or "f32": the type of plain weights, of tables, and of quantized weights'
            scales.
        input_scales: of the modules whose inputs are rounded to FP8.
    """
    kind, half = _TYPES[activations]
    packed = np.memmap(folder / WEIGHTS_NAME, np.uint8, "r")
    lowered = StoredWeights({}, {}, stored.entries)
    with WeightsFile(folder / LOWERED_NAME) as file:

        def add(name: str, laid: Laid) -> StoredTensor:
            data = np.ascontiguousarray(laid.data).reshape(-1).view(np.uint8)
            return file.add(name, laid.dtype, laid.shape, iter([data]))

        for name, vector in stored.vectors.items():
            values = _bytes(packed, vector).view(_VECTOR).reshape(vector.shape)
            lowered.vectors[name] = add(name, Laid("float32", vector.shape, values))
        for module, linear in stored.linears.items():
            is_gathered = module in GATHERED
            if is_gathered:
                table = _values(packed, linear).astype(half)
                lowered.vectors[module + TABLE] = add(module + TABLE, Laid(kind, table.shape, table))
                del table
            if is_gathered and not (module == "embedding" and spec.tie_embeddings):
                continue
            if is_gathered and isinstance(linear.format, FloatFormat):
                one = replace(linear, weight=lowered.vectors[module + TABLE])
            else:
                one = _lower(add, packed, module, linear, layout, kind, half)
            bias = None
            if linear.bias is not None:
                values = _bytes(packed, linear.bias).view(_VECTOR).reshape(linear.bias.shape)
                bias = add(module + ".bias", Laid("float32", linear.bias.shape, values))
            lowered.linears[module] = replace(one, bias=bias, input_scale=input_scales.get(module, 0.0))
        file.flush()
    return lowered


def _lower(
    add: Callable[[str, Laid], StoredTensor],
    packed: NDArray[np.uint8],
    module: str,
    linear: Linear,
    layout: Layout,
    kind: str,
    half: type[np.generic],
) -> Linear:
    if isinstance(linear.format, FloatFormat) and linear.format.type != "fp8":
        values = _values(packed, linear).astype(half)
        weight = add(module + ".weight", Laid(kind, values.shape, values))
        return replace(linear, format=FloatFormat(_format(half)), weight=weight)
    codes, scales = _codes(packed, linear)
    if isinstance(linear.format, LinearFormat):
        laid = layout.integers(codes, scales, linear.format, half)
    else:
        _check_scales(module, scales, half)
        laid = layout.fp8(codes, scales, half)
    weight, steps = (
        add(f"{module}.{name}", one) for name, one in zip(("weight", "scales"), laid, strict=True)
    )
    return replace(linear, weight=weight, scales=steps)


def _check_scales(module: str, scales: Float32, half: type[np.generic]) -> None:
    """A scale of FP8 codes that float16 holds as zero, or with few bits, would change the weight unseen."""
    if half is not np.float16:
        return
    low, high = np.finfo(np.float16).tiny, np.finfo(np.float16).max
    used = scales[scales != 0]
    if ((used < low) | (used > high)).any():
        raise UnsupportedError(
            f"{module} has scales from {used.min():.2g} to {used.max():.2g}; float16 holds {low:.2g} to "
            f"{high:.0f}. Export with --activations bf16."
        )


def _bytes(packed: NDArray[np.uint8], tensor: StoredTensor) -> NDArray[np.uint8]:
    return packed[tensor.offset : tensor.offset + tensor.length]


def _apart(rows: NDArray[T], linear: Linear) -> NDArray[T]:
    """Rows of gated layers, whose tiles alternate, as all of the gate's and then all others."""
    if not linear.gated:
        return rows
    pairs = rows.reshape(-1, 2, TILE_COLUMNS, rows.shape[1])
    return np.concatenate([pairs[:, 0].reshape(-1, rows.shape[1]), pairs[:, 1].reshape(-1, rows.shape[1])])


def _codes(packed: NDArray[np.uint8], linear: Linear) -> tuple[NDArray[Any], Float32]:
    data = np.ascontiguousarray(_bytes(packed, linear.weight))
    size = (linear.in_features, linear.out_features)
    if isinstance(linear.format, LinearFormat):
        codes, scales, minimums = packing.unpack(data, *size, linear.format)
        assert minimums is None
        return _apart(codes, linear), _apart(scales.astype(np.float32), linear)
    values, steps = float_packing.unpack(data, *size, linear.format)
    assert steps is not None
    return _apart(values, linear), _apart(steps, linear)


def _values(packed: NDArray[np.uint8], linear: Linear) -> Float32:
    data = np.ascontiguousarray(_bytes(packed, linear.weight))
    size = (linear.in_features, linear.out_features)
    if isinstance(linear.format, LinearFormat):
        values = packing.dequantize(*packing.unpack(data, *size, linear.format), linear.format)
    else:
        values = float_packing.dequantize(*float_packing.unpack(data, *size, linear.format), linear.format)
    return _apart(values, linear)


class QdqLayout:
    """For DequantizeLinear in front of a MatMul: [in, out], scales along the inputs first."""

    def integers(
        self, codes: packing.Codes, scales: Float32, format: LinearFormat, half: type[np.generic]
    ) -> tuple[Laid, Laid]:
        assert format.bits == 4
        # Codes 0..15 stand for -8..7: the sign bit is flipped. Two to a byte, the first in the low half.
        signed = np.ascontiguousarray((codes ^ 8).T).reshape(-1)
        pairs = signed[0::2] | signed[1::2] << 4
        return (
            Laid("int4", codes.T.shape, pairs.astype(np.uint8)),
            Laid(_name(half), scales.T.shape, scales.T.astype(half)),
        )

    def fp8(self, codes: NDArray[np.uint8], scales: Float32, half: type[np.generic]) -> tuple[Laid, Laid]:
        return (
            Laid("float8", codes.T.shape, np.ascontiguousarray(codes.T)),
            Laid(_name(half), (len(scales),), scales[:, 0].astype(half)),
        )


def _name(half: type[np.generic]) -> str:
    return next(name for name, kind in _TYPES.values() if kind is half)


def _format(half: type[np.generic]) -> str:
    return next(name for name, (_, kind) in _TYPES.items() if kind is half)
