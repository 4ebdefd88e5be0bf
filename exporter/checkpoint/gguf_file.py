"""A GGUF file: every tensor type that the gguf package can dequantize, and exact blocks of three."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.base import Blocks, Checkpoint
from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.exporter.checkpoint.gguf_config import spec_from_metadata
from pagelet.exporter.checkpoint.gguf_header import GGUFHeader, read_header
from pagelet.exporter.checkpoint.sources import match_weights
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.names import GGUF_NAMES
from pagelet.models.spec import ModelSpec

ROPE_FACTORS = "rope_freqs.weight"
_HALF = np.dtype("<f2")


class GGUFCheckpoint(Checkpoint):
    """Weights of one GGUF file, its q and k rows back in the order of half-rotation."""

    kind = "gguf"

    def read(self, role: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        info = self.weights[role]
        start, stop = self._rows(role, start, stop)
        if len(info.shape) == 1:
            # One element is no whole block: a vector is small, so it is read as one row.
            values = _dequantize(self._read_rows(_as_row(info), 0, 1), info.dtype).reshape(-1)
            rows = self._file_rows(role, start, stop)
            return values[start:stop] if rows is None else values.take(rows)
        raw = self._read_file_rows(role, info, start, stop)
        return _dequantize(raw, info.dtype).reshape(stop - start, *info.shape[1:])

    def read_blocks(self, role: str, start: int = 0, stop: int | None = None) -> Blocks | None:
        info = self.weights[role]
        if info.dtype not in _SPLIT or len(info.shape) != 2:
            return None
        raw = self._read_file_rows(role, info, *self._rows(role, start, stop))
        _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[info.dtype]]
        split = _SPLIT[info.dtype]
        return split(raw.reshape(raw.shape[0], -1, block_bytes))

    def _read_file_rows(self, role: str, info: TensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
        """The raw rows; of permuted weights all between the first and the last: two heads more at most."""
        rows = self._file_rows(role, start, stop)
        if rows is None:
            return self._read_rows(info, start, stop)
        first = int(rows.min())
        return self._read_rows(info, first, int(rows.max()) + 1)[rows - first]

    def _file_rows(self, role: str, start: int, stop: int) -> NDArray[np.intp] | None:
        """Where the rows [start:stop] of q or k lie in the file; None if where they belong.

        llama.cpp's converter stores row j + part·D/2 of a head as its row 2j + part: paired for
        interleaved rotation.
        """
        permuted = role.rsplit(".", 1)[0].endswith(("attention.q", "attention.k"))
        if not (permuted and self.spec.row.gguf_permutes_rotary):
            return None
        rows, half = np.arange(start, stop), self.spec.layers[0].head_dim // 2
        return rows - rows % (2 * half) + 2 * (rows % half) + rows // half % 2


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open a GGUF file and match its tensors with its own metadata.

    Raises:
        CheckpointError: damaged or incomplete.
        UnsupportedError: an architecture, rope scaling or tensor type that is not known.
    """
    with ExitStack() as stack:
        file = SourceFile(path)
        stack.callback(file.close)
        header = read_header(file)
        if header.metadata.get("split.count", 1) != 1:
            raise UnsupportedError(
                f"{path} is one of several parts; join them with `llama-gguf-split --merge` first."
            )
        spec = spec_from_metadata(header.metadata, header.tensors, str(path))
        spec = _with_rope_factors(spec, header, file)
        readable = [kind.name for kind in GGML_QUANT_SIZES if _can_dequantize(kind)]
        ignored = (*spec.row.ignored, ROPE_FACTORS)
        weights = match_weights(spec, header.tensors, GGUF_NAMES, ignored, readable, str(path))
        files = {path.name: file}
        checkpoint = GGUFCheckpoint(path, spec, files, header.tensors, weights, header.metadata)
        stack.pop_all()
    return checkpoint


def _with_rope_factors(spec: ModelSpec, header: GGUFHeader, file: SourceFile) -> ModelSpec:
    """A file may carry the divisors of the rotary frequencies, one for each pair (Llama 3.1 and later)."""
    info = header.tensors.get(ROPE_FACTORS)
    if info is None:
        return spec
    rope = spec.ropes[0]
    if info.dtype != "F32" or info.shape != (rope.rotary_dim // 2,) or rope.scaling != "none":
        raise UnsupportedError(
            f"{file.path}: {ROPE_FACTORS} is {info.dtype} {list(info.shape)} beside rope scaling "
            f"{rope.scaling!r}; expected F32 [{rope.rotary_dim // 2}] and no other scaling."
        )
    divisors = file.read(info.offset, info.nbytes).view("<f4")
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} holds values that are not positive numbers.")
    rope = dataclasses.replace(rope, scaling="factors", frequency_divisors=tuple(divisors.tolist()))
    return dataclasses.replace(spec, ropes=(rope,))


def _as_row(info: TensorInfo) -> TensorInfo:
    return dataclasses.replace(info, shape=(1, *info.shape))


def _dequantize(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN is for the quantizer to report
        values: NDArray[np.float32] = dequantize(raw, GGMLQuantizationType[dtype])
    return values


@cache
def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _half(part: NDArray[np.uint8]) -> NDArray[np.float16]:
    return np.ascontiguousarray(part).view(_HALF)[..., 0]


def _nibbles(part: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[rows, blocks, 16] bytes to [rows, in]: the low halves of a block come first, then the high ones."""
    codes = np.concatenate([part & 15, part >> 4], axis=-1)
    return codes.reshape(part.shape[0], -1)


def _split_q4_0(raw: NDArray[np.uint8]) -> Blocks:
    return Blocks("Q4_0", _nibbles(raw[..., 2:]), _half(raw[..., :2]))


def _split_q4_1(raw: NDArray[np.uint8]) -> Blocks:
    return Blocks("Q4_1", _nibbles(raw[..., 4:]), _half(raw[..., :2]), _half(raw[..., 2:4]))


def _split_q8_0(raw: NDArray[np.uint8]) -> Blocks:
    codes = np.ascontiguousarray(raw[..., 2:]).view(np.int8)
    return Blocks("Q8_0", codes.reshape(raw.shape[0], -1), _half(raw[..., :2]))


_SPLIT: dict[str, Callable[[NDArray[np.uint8]], Blocks]] = {
    "Q4_0": _split_q4_0,
    "Q4_1": _split_q4_1,
    "Q8_0": _split_q8_0,
}
