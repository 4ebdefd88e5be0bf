"""The header of a safetensors file, read and checked against the file's real length.

Layout: u64 length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
"""

import math
from itertools import pairwise
from typing import Any

from pagelet.exporter.checkpoint.files import SourceFile, parse_json
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.strict import reject_unknown, require

# A header of a hundred thousand tensors has about 15 MB.
MAX_HEADER_BYTES = 32 << 20
_MAX_DIMENSIONS = 8
_MAX_DIMENSION = 1 << 40

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def read_header(file: SourceFile) -> dict[str, TensorInfo]:
    """Every tensor of the file, by name; no tensor data is read.

    Raises:
        CheckpointError: truncated or damaged; the message names the file.
        UnsupportedError: a dtype that the format's table does not have.
    """
    length = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file.path} claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are read. "
            "Is it a safetensors file?"
        )
    where = f"{file.path}: header"
    try:
        text = file.read(8, length).tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 ({error}). Download it again.") from error
    entries = parse_json(text, where)
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, 8 + length, file) for name, entry in entries.items()}
    _check_layout(tensors, 8 + length, file)
    return tensors


def _tensor(name: str, entry: Any, data_start: int, file: SourceFile) -> TensorInfo:
    where = f"{file.path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is described by {entry!r:.80}; expected an object.")
    reject_unknown(entry, ("dtype", "shape", "data_offsets"), where, CheckpointError)
    dtype = require(entry, "dtype", str, where, CheckpointError)
    if dtype not in ITEM_SIZES:
        raise UnsupportedError(f"{where} has dtype {dtype!r}; known are {', '.join(ITEM_SIZES)}.")
    shape = _integers(entry, "shape", where)
    offsets = _integers(entry, "data_offsets", where)
    if len(shape) > _MAX_DIMENSIONS or len(offsets) != 2:
        raise CheckpointError(
            f"{where} has {len(shape)} dimensions and {len(offsets)} offsets; "
            f"expected at most {_MAX_DIMENSIONS} and exactly 2."
        )
    nbytes = math.prod(shape) * ITEM_SIZES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where} takes bytes {offsets[0]} to {offsets[1]}, but {dtype} {list(shape)} has {nbytes} bytes."
        )
    return TensorInfo(name, shape, dtype, nbytes, file.path.name, data_start + offsets[0])


def _integers(entry: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    values = require(entry, key, list, where, CheckpointError)
    for value in values:
        if type(value) is not int or not 0 <= value <= _MAX_DIMENSION:
            raise CheckpointError(
                f"{where}: {key} holds {value!r:.40}; expected integers from 0 to {_MAX_DIMENSION}."
            )
    return tuple(values)


def _check_layout(tensors: dict[str, TensorInfo], data_start: int, file: SourceFile) -> None:
    """The tensors must cover the data without a hole or an overlap, to the file's last byte."""
    ordered = sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes))
    end = ordered[-1].offset + ordered[-1].nbytes if ordered else data_start
    if file.size < end:
        raise CheckpointError(
            f"{file.path} is truncated: it has {file.size} bytes of {end}. Download it again."
        )
    if ordered and ordered[0].offset != data_start:
        raise CheckpointError(f"{file.path}: unused bytes before tensor {ordered[0].name!r}.")
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes != after.offset:
            raise CheckpointError(
                f"{file.path}: tensors {before.name!r} and {after.name!r} overlap or leave a hole."
            )
    if file.size != end:
        raise CheckpointError(
            f"{file.path} has {file.size} bytes, its header describes {end}. Download it again."
        )
