"""Weights that are quantized in the files: several tensors stand as one, and a scheme says which and how."""

import abc
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.base import Blocks
from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError

FLOATS = ("F32", "F16", "BF16")
_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
# What may be read at once of a tensor that says something of the others.
_MAX_WHOLE_BYTES = 256 << 20


class PackedWeight(abc.ABC):
    """One weight out of several tensors.

    Attributes:
        info: as it stands in place of its parts: name, shape [out, in], a dtype of its scheme, their bytes.
    """

    info: TensorInfo

    @property
    def obstacle(self) -> str:
        """Why there are no `blocks`; "" where there are."""
        return "its codes are no even steps"

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start:stop], dequantized as its format defines, in float32."""

    def blocks(self, start: int, stop: int) -> Blocks | None:
        """The same rows as the file's own codes, where `Blocks` have that form."""
        return None


class PackedExperts(PackedWeight):
    """A parameter [experts, in, out]; rows of `read` are experts."""

    @abc.abstractmethod
    def read_expert(self, expert: int, start: int, stop: int) -> NDArray[np.float32]:
        """Outputs [start:stop] of one expert as a linear weight, float32 [outputs, in]."""


class Scheme(Protocol):
    """How a `quant_method` stores weights; made from its settings, which it checked.

    Attributes:
        leftovers: endings of tensors beside the weights that their values do not depend on.
        fp8_block: rows and inputs of a block with one scale, as config.json has them; None: not said.
        has_fp8: whether E4M3 weights with scales may stand beside what it packs (`checkpoint/fp8.py`).
        notes: what the user should be told.
    """

    leftovers: tuple[str, ...]
    fp8_block: object
    has_fp8: bool
    notes: tuple[str, ...]

    def weights(self, parts: "Parts") -> Iterator[PackedWeight]:
        """Every packed weight; takes the tensors that it consists of.

        Raises:
            CheckpointError: a part is missing, or of a wrong shape, dtype or value.
        """


class Parts:
    """The tensors of a checkpoint, to be taken, and read in pieces."""

    def __init__(self, tensors: Mapping[str, TensorInfo], files: Mapping[str, SourceFile]) -> None:
        self.left = dict(tensors)
        self._files = files

    def modules(self, suffix: str) -> list[str]:
        """What stands before `suffix` in the names of the tensors that have it."""
        return [name.removesuffix(suffix) for name in self.left if name.endswith(suffix)]

    def take(self, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> TensorInfo:
        """A part of a weight; None in `shape` stands for any positive number.

        Raises:
            CheckpointError: it is missing, or another was expected.
        """
        if name not in self.left:
            raise CheckpointError(f"{name} is missing: the weight cannot be read without it.")
        info = self.left.pop(name)
        fits = len(info.shape) == len(shape) and all(
            size == wanted if wanted is not None else size > 0
            for size, wanted in zip(info.shape, shape, strict=True)
        )
        if info.dtype not in dtypes or not fits:
            sizes = ", ".join("n" if size is None else str(size) for size in shape)
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)}; expected {' or '.join(dtypes)} [{sizes}]."
            )
        return info

    def whole(self, info: TensorInfo) -> NDArray[Any]:
        """A small tensor.

        Raises:
            CheckpointError: it is none.
        """
        if info.nbytes > _MAX_WHOLE_BYTES:
            raise CheckpointError(
                f"{info.name} has {info.nbytes} bytes; at most {_MAX_WHOLE_BYTES} are expected of it."
            )
        return self._items(info, 0, math.prod(info.shape)).reshape(info.shape)

    def rows(self, info: TensorInfo, start: int, stop: int) -> NDArray[Any]:
        """[start:stop] along the first axis."""
        width = math.prod(info.shape[1:])
        return self._items(info, start * width, stop * width).reshape(stop - start, *info.shape[1:])

    def columns(self, info: TensorInfo, start: int, stop: int) -> NDArray[Any]:
        """[:, start:stop] of a tensor with two axes; nothing else of it is read."""
        rows, width = info.shape
        if (start, stop) == (0, width):
            return self._items(info, 0, rows * width).reshape(rows, width)
        part = np.empty((rows, stop - start), _DTYPES[info.dtype])
        for row in range(rows):
            part[row] = self._items(info, row * width + start, row * width + stop)
        return part

    def _items(self, info: TensorInfo, start: int, stop: int) -> NDArray[Any]:
        dtype = _DTYPES[info.dtype]
        data = self._files[info.file].read(
            info.offset + start * dtype.itemsize, (stop - start) * dtype.itemsize
        )
        return data.view(dtype)


def stands_for(name: str, shape: tuple[int, ...], dtype: str, parts: list[TensorInfo]) -> TensorInfo:
    """The weight that the parts are."""
    first = parts[0]
    return TensorInfo(name, shape, dtype, sum(part.nbytes for part in parts), first.file, first.offset)


def raised(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """Bytes of -128..127 as 0..255."""
    octets: NDArray[np.uint8] = codes.view(np.uint8) ^ np.uint8(0x80)
    return octets


def unpack(words: NDArray[np.generic], bits: int) -> NDArray[np.uint8]:
    """Little-endian words [rows, words] to their codes of 4 or 8 bits, the lowest first, [rows, codes]."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1)


def as_floats(values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Widened exactly; a NaN is for the quantizer to report."""
    with np.errstate(invalid="ignore"):
        return np.ascontiguousarray(values.astype(np.float32))
