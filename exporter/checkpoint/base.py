"""What every checkpoint offers, whatever its files are: tensors by role, read as streams of rows."""

import abc
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.exporter.checkpoint.sources import Source
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.spec import ModelSpec
from pagelet.plugins.float_packing import E4M3_VALUES


@dataclass(frozen=True)
class Blocks:
    """Rows of a block-quantized tensor with the file's own codes; the inputs of a group share a scale.

    Attributes:
        kind: "Q4_0" (w = scale · (code - 8)), "Q4_1" (w = scale · code + minimum) or
            "Q8_0" (w = scale · code).
        codes: [rows, in], uint8 0..15, or int8 for Q8_0.
        scales: float16 [rows, groups].
        minimums: float16 [rows, groups] for Q4_1, else None.
        group_size: inputs of a group, a multiple of 32; 0: all of them.
        exact: whether the file's scales and minimums are FP16 numbers; else they were rounded to such.
    """

    kind: str
    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: NDArray[np.float16]
    minimums: NDArray[np.float16] | None = None
    group_size: int = 32
    exact: bool = True

    @property
    def bits(self) -> int:
        return 8 if self.kind == "Q8_0" else 4

    def picked(self, rows: NDArray[np.intp]) -> "Blocks":
        """Some of the rows."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minimums=minimums)


@dataclass(frozen=True)
class Fp8Rows:
    """Rows exactly as the file has them: w = scale · code.

    Attributes:
        codes: E4M3, uint8 [rows, in].
        scales: float32 [rows, groups].
        group_size: inputs that share a scale; 0: all of them.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    group_size: int

    def values(self) -> NDArray[np.float32]:
        """The weight, float32 [rows, in]; a last group may be cut short."""
        values: NDArray[np.float32] = E4M3_VALUES[self.codes]
        width = values.shape[1]
        values *= np.repeat(self.scales, self.group_size or width, axis=1)[:, :width]
        return values


class Checkpoint(abc.ABC):
    """An opened checkpoint; a context manager that closes its files.

    Attributes:
        path: what was opened.
        spec: the model; whether its head is tied is decided by what the files hold.
        tensors: every tensor, by its name in the file.
        weights: the model's tensors by role (`weight_shapes`), as if each had its own: complete, shapes
            checked.
        unused: names of the tensors that the model is known not to use.
        notes: what the user should be told.
        text_source: the folder with the tokenizer's files, or a GGUF file's metadata.
    """

    kind: str

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        files: Mapping[str, SourceFile],
        tensors: Mapping[str, TensorInfo],
        sources: Mapping[str, Source],
        text_source: Path | dict[str, Any],
        notes: Iterable[str] = (),
    ) -> None:
        self.path = path
        self.spec = spec
        self.tensors = dict(tensors)
        self._sources = dict(sources)
        self.weights = {role: source.logical for role, source in sources.items()}
        used = {info.name for info in self.weights.values()}
        self.unused = tuple(name for name in self.tensors if name not in used)
        self.notes = tuple(notes)
        self.text_source = text_source
        self._files = dict(files)

    @abc.abstractmethod
    def read(self, role: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Rows [start:stop], at least one, of a weight (elements, if it has one dimension) as float32.

        Only their bytes are read. Values may be NaN or infinite where the file's are.
        """

    def read_blocks(self, role: str, start: int = 0, stop: int | None = None) -> Blocks | None:
        """The same rows as the file's own codes and scales; None if it is not of such a type."""
        return None

    def obstacle(self, role: str) -> str:
        """Of quantized integers that `read_blocks` cannot give: why; "" of all others."""
        return ""

    def read_fp8(self, role: str, start: int = 0, stop: int | None = None) -> Fp8Rows | None:
        """The same rows as the file's own FP8 codes and scales; None if it is not of that type."""
        return None

    def source(self, role: str) -> Source:
        """Where the role's numbers lie among the tensors."""
        return self._sources[role]

    def use(self, role: str, info: TensorInfo) -> None:
        """Read another of its tensors as the weight of a role."""
        self._sources[role] = Source(info, info.shape, range(info.shape[0]))
        self.weights[role] = info

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source: no absolute path, sizes in bytes."""
        return {
            "kind": self.kind,
            "name": self.path.resolve().name,
            "files": {name: file.size for name, file in self._files.items()},
            "dtypes": dict(Counter(info.dtype for info in self.weights.values())),
        }

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _from_folder(self, role: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """What a tensor of the original or of an adapter means: Gemma's norms are stored as w - 1."""
        return values + np.float32(self.spec.row.norm_offset) if role.endswith("norm.weight") else values

    def _rows(self, role: str, start: int, stop: int | None) -> tuple[int, int]:
        rows = self.weights[role].shape[0]
        end = rows if stop is None else stop
        assert 0 <= start < end <= rows, f"{role}: rows {start}:{end} of {rows}"
        return start, end

    def _read_rows(self, info: TensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
        """uint8 [stop - start, bytes of a row]."""
        row_bytes = info.nbytes // info.shape[0]
        data = self._files[info.file].read(info.offset + start * row_bytes, (stop - start) * row_bytes)
        return data.reshape(stop - start, row_bytes)
