"""Weights from checkpoint to file, as a stream: a few rows at a time are read, quantized and written.

Linear layers that read the same input stand as one matrix (q, k and v; gate and up), so that the
graph runs one wide layer instead of three narrow ones. Gate and up alternate in tiles of 16 rows: the
op then has both factors of an output at hand.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.stacked_rows import (
    PIECE,
    PLAIN,
    Float32,
    StackedRows,
    Treatment,
    WeightFormat,
    read_finite,
)
from pagelet.models.manifest import TensorEntry
from pagelet.models.spec import ModelSpec
from pagelet.plugins.packing import LinearFormat

WEIGHTS_NAME = "model.weights"
# A cache line: the kernels then load whole vectors without crossing two.
_ALIGNMENT = 64
# The types of the ops, as users and the manifest call them.
_TYPE_NAMES = {"f16": "fp16", "f32": "fp32"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the weights file: `dtype` "float32" or "uint8", bytes [offset, offset + length)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class Linear:
    """A linear layer y = x Wᵀ + b as stored."""

    in_features: int
    out_features: int
    format: WeightFormat
    weight: StoredTensor
    bias: StoredTensor | None = None
    gated: bool = False  # the outputs are pairs of tiles, gate and up


@dataclass(frozen=True)
class StoredWeights:
    """All weights of a model by module name; the head is the embedding itself where they are tied."""

    linears: dict[str, Linear]
    vectors: dict[str, StoredTensor]
    entries: dict[str, TensorEntry]


class WeightsFile:
    """Appends tensors to one file, each aligned; the file is mapped at run time."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """`keep`: bytes of an existing file to go on behind; 0 begins a new one."""
        self._stream: BinaryIO = path.open("r+b" if keep else "wb")
        self._stream.truncate(keep)
        self._stream.seek(keep)

    def __enter__(self) -> "WeightsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def length(self) -> int:
        """Bytes so far."""
        return self._stream.tell()

    def flush(self) -> None:
        """Whoever maps the file now finds all tensors so far, even after a power cut."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], pieces: Iterator[NDArray[np.generic]]
    ) -> StoredTensor:
        offset = -(-self._stream.tell() // _ALIGNMENT) * _ALIGNMENT
        self._stream.write(b"\0" * (offset - self._stream.tell()))
        for piece in pieces:
            self._stream.write(np.ascontiguousarray(piece).data)
        return StoredTensor(name, dtype, shape, offset, self._stream.tell() - offset)


def layer_units(layer: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, roles stacked along its outputs) of a layer's linear layers, in graph order."""
    at = f"layers.{layer}."
    yield at + "attention.qkv", tuple(at + "attention." + part for part in "qkv")
    yield at + "attention.o", (at + "attention.o",)
    yield at + "mlp.gate_up", (at + "mlp.gate", at + "mlp.up")
    yield at + "mlp.down", (at + "mlp.down",)


def linear_units(spec: ModelSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Those of the whole model.

    The embedding table counts as one: tied to the head, it is the head's weight.
    """
    yield "embedding", ("embedding",)
    for layer in range(spec.num_layers):
        yield from layer_units(layer)
    if not spec.tie_embeddings:
        yield "head", ("head",)


def norm_roles(spec: ModelSpec) -> Iterator[str]:
    """Roles of the norms' weights, without their ending."""
    for role, shape in spec.weight_shapes():
        if len(shape) == 1 and role.endswith("norm.weight"):
            yield role.removesuffix(".weight")


class WeightsWriter:
    """Writes a model's tensors into a weights file, and keeps account of them in `stored`."""

    def __init__(
        self, checkpoint: Checkpoint, file: WeightsFile, stored: StoredWeights | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._file = file
        self.stored = stored or StoredWeights({}, {}, {})

    def linear(
        self, module: str, roles: Sequence[str], format: WeightFormat, treatment: Treatment = PLAIN
    ) -> None:
        """A matrix, a piece at a time, with its bias.

        Raises:
            CheckpointError: a tensor holds NaN or infinity, or does not fit the format; by its name.
        """
        rows = stacked(self._checkpoint, module, roles, format, treatment)
        bias = None
        if roles[0] + ".bias" in self._checkpoint.weights:
            values = [self._scaled(role, ".bias", treatment.output_scales) for role in roles]
            bias = self._vector(module + ".bias", np.concatenate(values))
        size = format.packed_bytes(rows.width, rows.count)
        weight = self._file.add(module + ".weight", "uint8", (size,), rows.pieces())
        assert weight.length == size, f"{module}: packed {weight.length} bytes, expected {size}"
        self.stored.linears[module] = Linear(
            rows.width, rows.count, format, weight, bias, gated=module.endswith("mlp.gate_up")
        )
        self.stored.entries[module] = TensorEntry(
            type_name(format),
            (rows.count, rows.width),
            size,
            format.group_size,
            symmetric=isinstance(format, LinearFormat) and not format.asymmetric,
            exact=rows.exact,
            error=rows.error,
        )

    def norm(self, role: str, scales: Mapping[str, Float32] | None = None) -> None:
        """A norm's weight, divided by its scales where it has some."""
        self.stored.vectors[role + ".weight"] = self._vector(
            role + ".weight", self._scaled(role, ".weight", scales or {})
        )

    def rope_tables(self, spec: ModelSpec) -> None:
        """cos and sin of every position, in pieces: contexts of millions of tokens have large tables."""
        half = spec.rope.rotary_dim // 2
        step = max(PIECE // half, 1)
        for which, name in enumerate(("rope.cos", "rope.sin")):
            pieces = (
                spec.rope.tables(min(step, spec.max_context - start), start)[which]
                for start in range(0, spec.max_context, step)
            )
            self.stored.vectors[name] = self._file.add(name, "float32", (spec.max_context, half), pieces)

    def _scaled(self, role: str, kind: str, scales: Mapping[str, Float32]) -> Float32:
        values = read_finite(self._checkpoint, role + kind)
        return values / scales[role] if role in scales else values

    def _vector(self, name: str, values: Float32) -> StoredTensor:
        return self._file.add(name, "float32", values.shape, iter([values]))


def stacked(
    checkpoint: Checkpoint,
    module: str,
    roles: Sequence[str],
    format: WeightFormat,
    treatment: Treatment = PLAIN,
) -> StackedRows:
    """The module's rows; those of gate and up alternate."""
    return StackedRows(
        checkpoint,
        [role + ".weight" for role in roles],
        format,
        interleaved=module.endswith("mlp.gate_up"),
        treatment=treatment,
    )


def type_name(format: WeightFormat) -> str:
    """The storage as `--weights` and the manifest call it."""
    return _TYPE_NAMES.get(format.weight_type, format.weight_type)
