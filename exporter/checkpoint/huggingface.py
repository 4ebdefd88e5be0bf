"""A Hugging Face folder: config.json and one or many safetensors files."""

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.base import Blocks, Checkpoint, Fp8Rows
from pagelet.exporter.checkpoint.files import SourceFile, read_json
from pagelet.exporter.checkpoint.fp8 import FP8_COMPANIONS, FP8_DTYPE, read_scales
from pagelet.exporter.checkpoint.packed import PackedExperts, PackedWeight, Parts, Scheme, scheme_of
from pagelet.exporter.checkpoint.packed.settings import settings_beside
from pagelet.exporter.checkpoint.safetensors_header import read_header
from pagelet.exporter.checkpoint.sources import Source, match_weights
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.exporter.checkpoint.text_model import text_tensors
from pagelet.models.config import spec_from_config
from pagelet.models.errors import CheckpointError
from pagelet.models.spec import ModelSpec
from pagelet.models.strict import require
from pagelet.models.weight_shapes import source_name
from pagelet.models.wrapped_config import text_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARDS = 1024
_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_COMPARE_BYTES = 1 << 20


class HuggingFaceCheckpoint(Checkpoint):
    """Weights from safetensors files: F32, F16 and BF16, widened to float32 exactly; scaled FP8; packed."""

    kind = "safetensors"

    def __init__(
        self,
        folder: Path,
        scheme: Scheme | None,
        spec: ModelSpec,
        files: Mapping[str, SourceFile],
        tensors: Mapping[str, TensorInfo],
        packed: Mapping[str, PackedWeight],
        sources: Mapping[str, Source],
        notes: Iterable[str],
    ) -> None:
        """`packed`: by the name in `tensors` that stands for its parts."""
        super().__init__(folder, spec, files, tensors, sources, folder, notes)
        self._packed = dict(packed)
        fp8 = {source.info.name: source.info for source in sources.values() if source.info.dtype == FP8_DTYPE}
        self._scales = {
            name: read_scales(info, tensors, scheme and scheme.fp8_block, self._whole)
            for name, info in fp8.items()
        }

    def read(self, role: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        source, (start, stop) = self._sources[role], self._rows(role, start, stop)
        fp8 = self.read_fp8(role, start, stop)
        if fp8 is not None:
            return fp8.values()
        packed = self._packed.get(source.info.name)
        if isinstance(packed, PackedExperts):
            low, high, picked = source.span(start, stop)
            values = packed.read_expert(source.expert, low, high)
            return values if picked is None else values[picked]
        if source.transposed:
            columns = self._floats(source.info, 0, source.info.shape[0])[:, source.rows[start:stop]]
            return np.ascontiguousarray(columns.T)
        low, high, picked = source.span(start, stop)
        values = packed.read(low, high) if packed else self._floats(source.info, low, high)
        values = values if picked is None else values[picked]
        return self._from_folder(role, values)

    def read_blocks(self, role: str, start: int = 0, stop: int | None = None) -> Blocks | None:
        packed = self._packed.get(self.weights[role].name)
        low, high, picked = self._sources[role].span(*self._rows(role, start, stop))
        blocks = packed.blocks(low, high) if packed else None
        return blocks if blocks is None or picked is None else blocks.picked(picked)

    def obstacle(self, role: str) -> str:
        packed = self._packed.get(self.weights[role].name)
        return packed.obstacle if packed else ""

    def read_fp8(self, role: str, start: int = 0, stop: int | None = None) -> Fp8Rows | None:
        source = self._sources[role]
        if source.info.name not in self._scales:
            return None
        low, high, picked = source.span(*self._rows(role, start, stop))
        rows = self._scales[source.info.name].rows(self._read_rows(source.info, low, high), low)
        return rows if picked is None else Fp8Rows(rows.codes[picked], rows.scales[picked], rows.group_size)

    def _whole(self, info: TensorInfo) -> NDArray[np.float32]:
        return self._floats(dataclasses.replace(info, shape=info.shape or (1,)), 0, (info.shape or (1,))[0])

    def _floats(self, info: TensorInfo, start: int, stop: int) -> NDArray[np.float32]:
        raw = self._read_rows(info, start, stop)
        with np.errstate(invalid="ignore"):  # a NaN is for the quantizer to report
            values = raw.view(_DTYPES[info.dtype]).astype(np.float32, copy=False)
        return values.reshape(-1, *info.shape[1:])


def open_huggingface(folder: Path) -> HuggingFaceCheckpoint:
    """Open the folder's safetensors files and match them with its config.json.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are not those of the config.
        UnsupportedError: an architecture or dtype that is not known.
    """
    whole = read_json(folder / "config.json")
    config = text_config(whole)
    if not config.get("quantization_config") and (beside := settings_beside(folder)):
        config = {**config, "quantization_config": beside}
    spec = spec_from_config(config)
    scheme = scheme_of(config)
    with ExitStack() as stack:
        files: dict[str, SourceFile] = {}
        tensors: dict[str, TensorInfo] = {}
        for name in _file_names(folder):
            file = SourceFile(folder / name)
            stack.callback(file.close)
            files[name] = file
            for tensor, info in read_header(file).items():
                if tensor in tensors:
                    raise CheckpointError(
                        f"{folder}: tensor {tensor!r} is in {tensors[tensor].file} and in {name}."
                    )
                tensors[tensor] = info
        _check_index(folder, tensors)
        tensors, parts = text_tensors(whole, tensors)
        tensors, packed = _put_together(scheme, tensors, files)
        spec, notes = _settle_tie(spec, tensors, files)
        ignored, readable = _ignored(spec), {*_DTYPES, *(weight.info.dtype for weight in packed.values())}
        if scheme:
            ignored += scheme.leftovers
            notes += scheme.notes
        if scheme and scheme.has_fp8:
            ignored += FP8_COMPANIONS
            readable.add(FP8_DTYPE)
        sources = match_weights(spec, tensors, spec.row.names, ignored, sorted(readable), str(folder))
        checkpoint = HuggingFaceCheckpoint(
            folder, scheme, spec, files, tensors, packed, sources, [*parts, *notes]
        )
        stack.pop_all()
    return checkpoint


def _put_together(
    scheme: Scheme | None, tensors: dict[str, TensorInfo], files: Mapping[str, SourceFile]
) -> tuple[dict[str, TensorInfo], dict[str, PackedWeight]]:
    """The tensors with one in place of each packed weight's parts, and those weights by that name."""
    if scheme is None:
        return tensors, {}
    parts = Parts(tensors, files)
    packed = {weight.info.name: weight for weight in scheme.weights(parts)}
    for name in packed:
        if name in parts.left:
            raise CheckpointError(f"{name} is in the files twice: as it is, and packed. Download them again.")
    return parts.left | {name: weight.info for name, weight in packed.items()}, packed


def _file_names(folder: Path) -> list[str]:
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        names = sorted(set(_weight_map(folder).values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not 1 <= len(names) <= MAX_SHARDS:
        raise CheckpointError(f"{folder} has {len(names)} safetensors files; expected 1 to {MAX_SHARDS}.")
    for name in names:
        # Only the name is judged: a download cache links its files to where it keeps them.
        if name != Path(name).name or "\\" in name or ":" in name or "\0" in name:
            raise CheckpointError(
                f"{folder / INDEX_FILE} names {name!r}, which is not a file of the folder; refused."
            )
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} is missing; {INDEX_FILE} names it. Download it again.")
    return names


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    entries = require(read_json(path), "weight_map", dict, str(path), CheckpointError)
    for tensor in entries:
        require(entries, tensor, str, f"{path}: weight_map", CheckpointError)
    return dict(entries)


def _check_index(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    if (folder / SINGLE_FILE).exists() or not (folder / INDEX_FILE).exists():
        return
    for tensor, name in _weight_map(folder).items():
        if tensor not in tensors or tensors[tensor].file != name:
            raise CheckpointError(
                f"{folder / INDEX_FILE} says that {tensor!r} is in {name}; it is not. Download both again."
            )


def _ignored(spec: ModelSpec) -> tuple[str, ...]:
    head = (source_name("head.weight", spec.row.names),) if spec.tie_embeddings else ()
    return (*spec.row.ignored, *head)


def _settle_tie(
    spec: ModelSpec, tensors: Mapping[str, TensorInfo], files: Mapping[str, SourceFile]
) -> tuple[ModelSpec, list[str]]:
    """Believe a declared tie only if the head is absent or equal to the embedding, byte for byte."""
    head = tensors.get(source_name("head.weight", spec.row.names))
    embedding = tensors.get(source_name("embedding.weight", spec.row.names))
    if not spec.tie_embeddings or head is None or embedding is None or _equal(head, embedding, files):
        return spec, []
    note = f"config.json ties the head to the embedding, but {head.name} differs from it: exported untied."
    return dataclasses.replace(spec, tie_embeddings=False), [note]


def _equal(left: TensorInfo, right: TensorInfo, files: Mapping[str, SourceFile]) -> bool:
    if (left.shape, left.dtype) != (right.shape, right.dtype) or left.dtype not in _DTYPES:
        return False
    for start in range(0, left.nbytes, _COMPARE_BYTES):
        count = min(_COMPARE_BYTES, left.nbytes - start)
        pieces = (files[info.file].read(info.offset + start, count) for info in (left, right))
        if not np.array_equal(next(pieces), next(pieces)):
            return False
    return True
