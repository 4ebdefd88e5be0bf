"""Weights from checkpoint to file, as a stream: a few rows at a time are read, quantized and written.

Linear layers that read the same input stand as one matrix (q, k and v; gate and up), so that the
graph runs one wide layer instead of three narrow ones. Gate and up alternate in tiles of 16 rows: the
op then has both factors of an output at hand.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.stacked_rows import PIECE, StackedRows, WeightFormat, read_finite
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


@dataclass(frozen=True)
class Formats:
    """How the matrices are stored: of the layers, and of the embedding table and the head."""

    layers: WeightFormat
    tables: WeightFormat

    def of(self, module: str) -> WeightFormat:
        return self.tables if module in ("embedding", "head") else self.layers


class WeightsFile:
    """Appends tensors to one file, each aligned; the file is mapped at run time."""

    def __init__(self, path: Path) -> None:
        self._stream: BinaryIO = path.open("wb")

    def __enter__(self) -> "WeightsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], pieces: Iterator[NDArray[np.generic]]
    ) -> StoredTensor:
        offset = -(-self._stream.tell() // _ALIGNMENT) * _ALIGNMENT
        self._stream.write(b"\0" * (offset - self._stream.tell()))
        for piece in pieces:
            self._stream.write(np.ascontiguousarray(piece).data)
        return StoredTensor(name, dtype, shape, offset, self._stream.tell() - offset)


OnTensor = Callable[[int, int, str], None]
"""on_tensor(tensors done, tensors in all, name of the next)."""


def linear_units(spec: ModelSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, roles stacked along its outputs) of every linear layer, in graph order.

    The embedding table counts as one: tied to the head, it is the head's weight.
    """
    yield "embedding", ("embedding",)
    for layer in range(spec.num_layers):
        at = f"layers.{layer}."
        yield at + "attention.qkv", tuple(at + "attention." + part for part in "qkv")
        yield at + "attention.o", (at + "attention.o",)
        yield at + "mlp.gate_up", (at + "mlp.gate", at + "mlp.up")
        yield at + "mlp.down", (at + "mlp.down",)
    if not spec.tie_embeddings:
        yield "head", ("head",)


def vector_roles(spec: ModelSpec) -> Iterator[str]:
    """Roles of the norm weights."""
    for role, shape in spec.weight_shapes():
        if len(shape) == 1 and role.endswith("norm.weight"):
            yield role


def write_weights(
    checkpoint: Checkpoint, spec: ModelSpec, formats: Formats, folder: Path, on_tensor: OnTensor
) -> StoredWeights:
    """Stream every weight into `folder`/model.weights, the matrices in `formats`.

    Raises:
        CheckpointError: a tensor holds NaN or infinity, or does not fit its format; by its name.
    """
    units, vectors = list(linear_units(spec)), list(vector_roles(spec))
    total = len(units) + len(vectors) + 1
    stored = StoredWeights({}, {}, {})
    with WeightsFile(folder / WEIGHTS_NAME) as file:
        for done, (module, roles) in enumerate(units):
            on_tensor(done, total, module)
            stored.linears[module], stored.entries[module] = _write_linear(
                checkpoint, module, roles, formats.of(module), file
            )
        for done, role in enumerate(vectors, len(units)):
            on_tensor(done, total, role)
            stored.vectors[role] = _write_vector(file, role, read_finite(checkpoint, role))
        on_tensor(total - 1, total, "rope tables")
        for which, name in enumerate(("rope.cos", "rope.sin")):
            stored.vectors[name] = _write_rope_table(file, name, spec, which)
        on_tensor(total, total, "")
    return stored


def _write_vector(file: WeightsFile, name: str, values: NDArray[np.float32]) -> StoredTensor:
    return file.add(name, "float32", values.shape, iter([values]))


def _write_rope_table(file: WeightsFile, name: str, spec: ModelSpec, which: int) -> StoredTensor:
    """cos (0) or sin (1) of every position, in pieces: contexts of millions of tokens have large tables."""
    half = spec.rope.rotary_dim // 2
    step = max(PIECE // half, 1)
    starts = range(0, spec.max_context, step)
    pieces = (spec.rope.tables(min(step, spec.max_context - start), start)[which] for start in starts)
    return file.add(name, "float32", (spec.max_context, half), pieces)


def _write_linear(
    checkpoint: Checkpoint, module: str, roles: tuple[str, ...], format: WeightFormat, file: WeightsFile
) -> tuple[Linear, TensorEntry]:
    gated = module.endswith("mlp.gate_up")
    rows = StackedRows(checkpoint, [role + ".weight" for role in roles], format, interleaved=gated)
    bias = None
    if roles[0] + ".bias" in checkpoint.weights:
        values = np.concatenate([read_finite(checkpoint, role + ".bias") for role in roles])
        bias = _write_vector(file, module + ".bias", values)
    size = format.packed_bytes(rows.width, rows.count)
    weight = file.add(module + ".weight", "uint8", (size,), rows.pieces())
    assert weight.length == size, f"{module}: packed {weight.length} bytes, expected {size}"
    entry = TensorEntry(
        type_name(format),
        (rows.count, rows.width),
        size,
        format.group_size,
        symmetric=isinstance(format, LinearFormat) and not format.asymmetric,
        exact=rows.exact,
    )
    return Linear(rows.width, rows.count, format, weight, bias, gated), entry


def type_name(format: WeightFormat) -> str:
    """The storage as `--weights` and the manifest call it."""
    return _TYPE_NAMES.get(format.weight_type, format.weight_type)
