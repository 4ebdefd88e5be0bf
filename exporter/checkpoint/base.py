"""What every checkpoint offers, whatever its files are: tensors by role, read as streams of rows."""

import abc
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.models.errors import CheckpointError
from pagelet.models.spec import ModelSpec, source_name
from pagelet.plugins.float_packing import E4M3_VALUES

# Norm and head of an inner layer: see `exporter/early_exit.py`.
_EXIT_TENSOR = re.compile(r"early_exit\.\d{1,4}\.(norm|head)\.weight")
# So many faults are named in one error; the rest are counted.
_NAMED = 5


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name: as in the file.
        shape: row-major; linear weights are [out, in] (a GGUF file's dimensions reversed).
        dtype: "F32", "BF16", "F16", "Q4_1", …
        nbytes: bytes in the file.
        file: the file's name.
        offset: its first byte there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str
    offset: int


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
        weights: the model's tensors by role (`ModelSpec.weight_shapes`): complete, shapes checked.
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
        weights: Mapping[str, TensorInfo],
        text_source: Path | dict[str, Any],
        notes: Iterable[str] = (),
    ) -> None:
        self.path = path
        self.spec = spec
        self.tensors = dict(tensors)
        self.weights = dict(weights)
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

    def use(self, role: str, info: TensorInfo) -> None:
        """Read another of its tensors as the weight of a role."""
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


def _is_exit(info: TensorInfo) -> bool:
    return _EXIT_TENSOR.fullmatch(info.name) is not None


def match_weights(
    spec: ModelSpec,
    tensors: Mapping[str, TensorInfo],
    names: Mapping[str, str],
    ignored: Iterable[str],
    readable: Iterable[str],
    where: str,
) -> dict[str, TensorInfo]:
    """Role to tensor for every weight of the model.

    `names` is the naming table, `ignored` the endings of tensors that may be left over, `readable`
    the dtypes that can be read.

    Raises:
        CheckpointError: names the tensors that are missing, unexpected, or of a wrong shape or dtype.
    """
    endings, dtypes = tuple(ignored), tuple(readable)
    wanted = {source_name(role, names): (role, shape) for role, shape in spec.weight_shapes()}
    faults = [f"{name} is missing" for name in wanted if name not in tensors]
    faults += [
        f"{name} is unexpected"
        for name in tensors
        if name not in wanted and not name.endswith(endings) and not _is_exit(tensors[name])
    ]
    weights = {}
    for name, (role, shape) in wanted.items():
        if name not in tensors:
            continue
        info = weights[role] = tensors[name]
        if info.shape != shape:
            faults.append(f"{name} has shape {list(info.shape)}, expected {list(shape)}")
    faults += [
        f"{info.name} has dtype {info.dtype}, which cannot be read (known: {', '.join(dtypes)})"
        for info in (*weights.values(), *filter(_is_exit, tensors.values()))
        if info.dtype not in dtypes
    ]
    if faults:
        rest = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise CheckpointError(
            f"{where} does not hold the weights of its configuration: {'; '.join(faults[:_NAMED])}{rest}."
        )
    return weights
