"""The header of a GGUF file (versions 2 and 3, little endian), every claim of it bounded.

Layout (ggml's GGUF specification): magic, u32 version, u64 tensor count, u64 pair count, the
key-value pairs, the tensor descriptions, padding to the alignment, the data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError, UnsupportedError

Item = TypeVar("Item")

# Far above real files (a vocabulary of 256 thousand tokens takes about 20 MB of header).
MAX_HEADER_BYTES = 256 << 20
MAX_TENSORS = 1 << 18
MAX_PAIRS = 1 << 14
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 4_000_000
MAX_NAME_BYTES = 1 << 10
MAX_ALIGNMENT = 1 << 16
_MAX_NESTING = 2
_MAX_DIMENSIONS = 4
_WINDOW = 1 << 20

_BOOL, _STRING, _ARRAY = 7, 8, 9
# The value types of ggml's `gguf_type`, as they lie in the file.
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata (arrays of numbers as NumPy arrays, arrays of strings as lists) and tensors by name.

    `arrays`: of each array of numbers in the metadata, its first byte in the file.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    arrays: dict[str, int]


def read_header(file: SourceFile) -> GGUFHeader:
    """Read and check the whole header; no tensor data is read.

    Raises:
        CheckpointError: not a GGUF file, truncated or damaged; the message names the file.
        UnsupportedError: a version or tensor type that is not known.
    """
    cursor = _Cursor(file)
    if file.size < 24 or cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{file.path} is not a GGUF file: it does not begin with 'GGUF' and a header.")
    version = cursor.integer(4)
    if version not in (2, 3):
        hint = "a big-endian file?" if version & 0xFFFF == 0 else "convert it with a newer llama.cpp."
        raise UnsupportedError(f"{file.path} has GGUF version {version}; versions 2 and 3 are read: {hint}")
    tensor_count = cursor.bounded(8, MAX_TENSORS, "tensors")
    pair_count = cursor.bounded(8, MAX_PAIRS, "key-value pairs")
    arrays: dict[str, int] = {}
    metadata = _named(cursor, pair_count, lambda name: _pair(cursor, name, arrays))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"{file.path}: general.alignment is {alignment!r:.40}; "
            f"expected a power of two up to {MAX_ALIGNMENT}."
        )
    tensors = _named(cursor, tensor_count, lambda name: _tensor(cursor, name, alignment))
    start = -(-cursor.position // alignment) * alignment
    return GGUFHeader(metadata, _placed(tensors, start, file), arrays)


class _Cursor:
    """Reads the header front to back through a small window; refuses to pass the file's end."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self.position = 0
        self._window = b""
        self._window_start = 0

    def take(self, count: int) -> bytes:
        at = self.position - self._window_start
        if at + count > len(self._window):
            if self.position + count > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{self.file.path} has a header of more than {MAX_HEADER_BYTES} bytes; refused."
                )
            room = max(self.file.size - self.position, 0)
            self._window = self.file.read(self.position, max(count, min(_WINDOW, room))).tobytes()
            self._window_start, at = self.position, 0
        self.position += count
        return self._window[at : at + count]

    def integer(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def bounded(self, nbytes: int, limit: int, what: str) -> int:
        value = self.integer(nbytes)
        if value > limit:
            raise CheckpointError(
                f"{self.file.path} claims {value} {what} at byte {self.position}; "
                f"at most {limit} are read. Is it damaged?"
            )
        return value

    def string(self, limit: int = MAX_STRING_BYTES) -> str:
        data = self.take(self.bounded(8, limit, "bytes in a string"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.file.path}: the string before byte {self.position} is not UTF-8 ({error.reason})."
            ) from error


def _named(cursor: _Cursor, count: int, read: Callable[[str], Item]) -> dict[str, Item]:
    found: dict[str, Item] = {}
    for _ in range(count):
        name = cursor.string(MAX_NAME_BYTES)
        if name in found:
            raise CheckpointError(f"{cursor.file.path}: {name!r} stands twice in the header.")
        found[name] = read(name)
    return found


def _pair(cursor: _Cursor, name: str, arrays: dict[str, int]) -> Any:
    value = _value(cursor)
    if isinstance(value, np.ndarray):
        arrays[name] = cursor.position - value.nbytes
    return value


def _value(cursor: _Cursor, nesting: int = 0, kind: int | None = None) -> Any:
    kind = cursor.integer(4) if kind is None else kind
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        return _array(cursor, nesting + 1)
    if kind not in _SCALARS:
        raise CheckpointError(f"{cursor.file.path}: unknown value type {kind} before byte {cursor.position}.")
    value = _numbers(cursor, kind, 1)[0].item()
    return bool(value) if kind == _BOOL else value


def _array(cursor: _Cursor, nesting: int) -> Any:
    if nesting > _MAX_NESTING:
        raise CheckpointError(f"{cursor.file.path}: arrays nested deeper than {_MAX_NESTING}; refused.")
    kind = cursor.integer(4)
    count = cursor.bounded(8, MAX_ARRAY_ITEMS, "items in an array")
    if kind in _SCALARS:
        return _numbers(cursor, kind, count)
    return [_value(cursor, nesting, kind) for _ in range(count)]


def _numbers(cursor: _Cursor, kind: int, count: int) -> NDArray[Any]:
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(cursor.take(count * dtype.itemsize), dtype)


def _tensor(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    """A tensor's description; its offset still counts from the start of the data."""
    where = f"{cursor.file.path}: tensor {name!r}"
    dimensions = cursor.bounded(4, _MAX_DIMENSIONS, f"dimensions of {name!r}")
    shape = tuple(cursor.integer(8) for _ in range(dimensions))[::-1]
    kind = cursor.integer(4)
    offset = cursor.integer(8)
    if kind not in [known.value for known in GGML_QUANT_SIZES]:
        raise UnsupportedError(f"{where} has type {kind}, which is not known; update the gguf package?")
    if not shape or 0 in shape:
        raise CheckpointError(f"{where} has shape {list(shape)}; expected 1 to 4 dimensions of at least 1.")
    block_items, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    dtype = GGMLQuantizationType(kind).name
    if shape[-1] % block_items:
        raise CheckpointError(
            f"{where} has rows of {shape[-1]} elements; {dtype} needs multiples of {block_items}."
        )
    if offset % alignment:
        raise CheckpointError(
            f"{where} begins at {offset}, which is not a multiple of the alignment {alignment}."
        )
    return TensorInfo(
        name, shape, dtype, math.prod(shape) // block_items * block_bytes, cursor.file.path.name, offset
    )


def _placed(tensors: dict[str, TensorInfo], start: int, file: SourceFile) -> dict[str, TensorInfo]:
    """The tensors with offsets in the file, which must hold them all, none over another."""
    placed = {
        name: TensorInfo(name, info.shape, info.dtype, info.nbytes, info.file, start + info.offset)
        for name, info in tensors.items()
    }
    ordered = sorted(placed.values(), key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(f"{file.path}: tensors {before.name!r} and {after.name!r} overlap.")
    if ordered and ordered[-1].offset + ordered[-1].nbytes > file.size:
        raise CheckpointError(
            f"{file.path} is truncated: it has {file.size} bytes, tensor {ordered[-1].name!r} ends at "
            f"{ordered[-1].offset + ordered[-1].nbytes}. Download it again."
        )
    return placed
