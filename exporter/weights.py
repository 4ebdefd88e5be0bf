"""Weights from checkpoint to file, as a stream: a few rows at a time are read, quantized and written.

Linear layers that read the same input stand as one matrix (q, k and v; gate and up), so that the
graph runs one wide layer instead of three narrow ones. Gate and up alternate in tiles of 16 rows: the
op then has both factors of an output at hand.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint import Blocks, Checkpoint
from pagelet.models.errors import CheckpointError
from pagelet.models.manifest import TensorEntry
from pagelet.models.spec import ModelSpec
from pagelet.plugins.packing import TILE_COLUMNS, LinearFormat, Quantized, pack, quantize_rtn

T = TypeVar("T", bound=np.generic)

WEIGHTS_NAME = "model.weights"
# A cache line: the kernels then load whole vectors without crossing two.
_ALIGNMENT = 64
# Floats of one piece of a stream; bounds the exporter's memory whatever the tensor's size.
_PIECE = 4 << 20


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
    """A linear layer y = x Wᵀ + b as stored; `format` None means plain float32 [out, in]."""

    in_features: int
    out_features: int
    weight: StoredTensor
    bias: StoredTensor | None = None
    format: LinearFormat | None = None
    gated: bool = False  # the outputs are pairs of tiles, gate and up


@dataclass(frozen=True)
class StoredWeights:
    """All weights of a model by module name; the head is the embedding itself where they are tied."""

    linears: dict[str, Linear]
    vectors: dict[str, StoredTensor]
    entries: dict[str, TensorEntry]


@dataclass(frozen=True)
class Formats:
    """How the matrices are stored: of the layers, and of the embedding table and the head. None: float32."""

    layers: LinearFormat | None
    tables: LinearFormat | None

    def of(self, module: str) -> LinearFormat | None:
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
        CheckpointError: a tensor holds NaN or infinity, or does not divide into groups; by its name.
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
            stored.vectors[role] = _write_vector(file, role, _finite(checkpoint, role))
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
    step = max(_PIECE // half, 1)
    starts = range(0, spec.max_context, step)
    pieces = (spec.rope.tables(min(step, spec.max_context - start), start)[which] for start in starts)
    return file.add(name, "float32", (spec.max_context, half), pieces)


def _write_linear(
    checkpoint: Checkpoint,
    module: str,
    roles: tuple[str, ...],
    format: LinearFormat | None,
    file: WeightsFile,
) -> tuple[Linear, TensorEntry]:
    gated = module.endswith("mlp.gate_up")
    rows = _StackedRows(checkpoint, [role + ".weight" for role in roles], interleaved=gated)
    bias = None
    if roles[0] + ".bias" in checkpoint.weights:
        values = np.concatenate([_finite(checkpoint, r + ".bias") for r in roles])
        bias = _write_vector(file, module + ".bias", values)
    shape = (rows.count, rows.width)
    if format is None:
        plain = (rows.floats(start, stop) for start, stop in rows.pieces())
        weight = file.add(module + ".weight", "float32", shape, plain)
        entry = TensorEntry("fp32", shape, weight.length)
        return Linear(rows.width, rows.count, weight, bias, None, gated), entry
    rows.check_groups(format)
    exact = rows.passes_through(format)
    encode = rows.exact if exact else rows.quantized
    packed = (pack(*encode(start, stop, format), format) for start, stop in rows.pieces())
    size = format.packed_bytes(rows.width, rows.count)
    weight = file.add(module + ".weight", "uint8", (size,), packed)
    assert weight.length == size, f"{module}: packed {weight.length} bytes, expected {size}"
    entry = TensorEntry(f"int{format.bits}", shape, size, format.group_size, not format.asymmetric, exact)
    return Linear(rows.width, rows.count, weight, bias, format, gated), entry


class _StackedRows:
    """The rows of several weights as if they were one matrix, read in pieces of whole tiles.

    They follow one another, or, `interleaved`, two of the same shape alternate tile by tile.
    """

    def __init__(self, checkpoint: Checkpoint, roles: list[str], *, interleaved: bool) -> None:
        self._checkpoint = checkpoint
        self._roles = roles
        self._interleaved = interleaved
        sizes = [checkpoint.weights[role].shape for role in roles]
        self.width = sizes[0][1]
        self._starts = np.cumsum([0, *(rows for rows, _ in sizes)]).tolist()
        self.count: int = self._starts[-1]
        if interleaved and self.count % (2 * TILE_COLUMNS):
            raise CheckpointError(
                f"{self._names()}: {self.count // 2} outputs; "
                f"this version needs a multiple of {TILE_COLUMNS}."
            )

    def pieces(self) -> Iterator[tuple[int, int]]:
        unit = 2 * TILE_COLUMNS if self._interleaved else TILE_COLUMNS
        step = max(_PIECE // self.width // unit, 1) * unit
        for start in range(0, self.count, step):
            yield start, min(start + step, self.count)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """(role, first row, last row) of each weight that rows [start, stop) touch."""
        if self._interleaved:
            yield from ((role, start // 2, stop // 2) for role in self._roles)
            return
        for role, first, last in zip(self._roles, self._starts, self._starts[1:], strict=False):
            if start < last and stop > first:
                yield role, max(start, first) - first, min(stop, last) - first

    def floats(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._stack(
            [_finite(self._checkpoint, role, low, high) for role, low, high in self._parts(start, stop)]
        )

    def _stack(self, parts: Sequence[NDArray[T]]) -> NDArray[T]:
        if not self._interleaved:
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        width = parts[0].shape[1]
        return np.stack([part.reshape(-1, TILE_COLUMNS, width) for part in parts], axis=1).reshape(-1, width)

    def quantized(self, start: int, stop: int, format: LinearFormat) -> Quantized:
        try:
            return quantize_rtn(self.floats(start, stop), format)
        except ValueError as error:
            raise CheckpointError(f"{self._names()}: {error}") from error

    def check_groups(self, format: LinearFormat) -> None:
        if self.width % format.group_size:
            raise CheckpointError(
                f"{self._names()}: {self.width} inputs do not divide into groups of {format.group_size}; "
                "choose a smaller --group-size, or --weights fp32."
            )

    def passes_through(self, format: LinearFormat) -> bool:
        """Whether every row has quantized numbers of its own that `format` holds unchanged."""
        blocks = [self._checkpoint.read_blocks(role, 0, 1) for role in self._roles]
        return all(block is not None and _fits(block, format) for block in blocks)

    def exact(self, start: int, stop: int, format: LinearFormat) -> Quantized:
        """The checkpoint's own codes, scales and minimums."""
        parts = []
        for role, low, high in self._parts(start, stop):
            block = self._checkpoint.read_blocks(role, low, high)
            assert block is not None
            parts.append((block.codes, block.scales, _minimums(block, format)))
        codes, scales, minimums = zip(*parts, strict=True)
        return self._stack(codes), self._stack(scales), self._stack(minimums) if format.asymmetric else None

    def _names(self) -> str:
        return ", ".join(self._checkpoint.weights[role].name for role in self._roles)


def _fits(block: Blocks, format: LinearFormat) -> bool:
    if format.group_size != 32 or block.bits != format.bits:
        return False
    return format.asymmetric or block.minimums is None


def _minimums(block: Blocks, format: LinearFormat) -> NDArray[np.float16] | None:
    """Q4_0's d·(q−8) is d·q + (−8·d), exactly: eight is a power of two."""
    if not format.asymmetric or block.minimums is not None:
        return block.minimums
    minimums: NDArray[np.float16] = block.scales * np.float16(-8)
    return minimums


def _finite(
    checkpoint: Checkpoint, role: str, start: int = 0, stop: int | None = None
) -> NDArray[np.float32]:
    values = checkpoint.read(role, start, stop)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{checkpoint.weights[role].name} holds NaN or infinity: the file is damaged; download it again."
        )
    return values
