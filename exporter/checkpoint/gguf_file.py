"""A GGUF file: every tensor type that the gguf package can dequantize, and exact blocks of three."""

import dataclasses
from collections.abc import Callable, Mapping
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
from pagelet.exporter.checkpoint.gguf_families import GGUFFamily
from pagelet.exporter.checkpoint.gguf_header import GGUFHeader, read_header
from pagelet.exporter.checkpoint.gguf_rope import read_factors
from pagelet.exporter.checkpoint.gguf_xielu import xielu_tensors
from pagelet.exporter.checkpoint.sources import Source, match_weights
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import UnsupportedError
from pagelet.models.spec import ModelSpec

_HALF = np.dtype("<f2")


class GGUFCheckpoint(Checkpoint):
    """Weights of one GGUF file, its q and k rows back in the order of half-rotation."""

    kind = "gguf"

    def __init__(
        self,
        file: SourceFile,
        header: GGUFHeader,
        spec: ModelSpec,
        sources: Mapping[str, Source],
        family: GGUFFamily,
    ) -> None:
        files = {file.path.name: file}
        notes = [family.note] if family.note else []
        super().__init__(file.path, spec, files, header.tensors, sources, header.metadata, notes)
        self._permuted = family.permuted

    def read(self, role: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        info, (start, stop) = self._sources[role].info, self._rows(role, start, stop)
        low, high, picked = self._span(role, start, stop)
        if len(info.shape) == 1:
            # One element is no whole block: a vector is small, so it is read as one row.
            values = _dequantize(self._read_rows(_as_row(info), 0, 1), info.dtype).reshape(-1)[low:high]
            return values if picked is None else values[picked]
        raw = self._read_rows(info, low, high)
        raw = raw if picked is None else raw[picked]
        return _dequantize(raw, info.dtype).reshape(stop - start, *info.shape[1:])

    def read_blocks(self, role: str, start: int = 0, stop: int | None = None) -> Blocks | None:
        info = self._sources[role].info
        if info.dtype not in _SPLIT or len(info.shape) != 2:
            return None
        low, high, picked = self._span(role, *self._rows(role, start, stop))
        raw = self._read_rows(info, low, high)
        raw = raw if picked is None else raw[picked]
        _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[info.dtype]]
        split = _SPLIT[info.dtype]
        return split(raw.reshape(raw.shape[0], -1, block_bytes))

    def _span(self, role: str, start: int, stop: int) -> tuple[int, int, NDArray[np.intp] | None]:
        """As `Source.span`; of permuted weights all between the first and the last: two heads more at most.

        llama.cpp's converter stores row j + part·D/2 of a head as its row 2j + part: paired for
        interleaved rotation. `source` has them in the model's order, as an adapter does.
        """
        if not (self._permuted and role.rsplit(".", 1)[0].endswith(("attention.q", "attention.k"))):
            return self._sources[role].span(start, stop)
        rows, half = np.arange(start, stop), self.spec.layers[0].head_dim // 2
        rows = rows - rows % (2 * half) + 2 * (rows % half) + rows // half % 2
        low = int(rows.min())
        return low, int(rows.max()) + 1, rows - low


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
        factors = read_factors(header.tensors, file)
        spec, family = spec_from_metadata(header.metadata, header.tensors, factors, str(path))
        tensors = header.tensors
        if spec.mlp.activation == "xielu":
            tensors = tensors | xielu_tensors(header, file, spec.num_layers)
        readable = [kind.name for kind in GGML_QUANT_SIZES if _can_dequantize(kind)]
        ignored = (*spec.row.ignored, *family.ignored, *factors)
        sources = match_weights(spec, tensors, family.names, ignored, readable, str(path))
        checkpoint = GGUFCheckpoint(file, header, spec, sources, family)
        stack.pop_all()
    return checkpoint


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
