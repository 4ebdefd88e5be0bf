"""An export that was cut goes on at its layer: what a half-written folder must hold to be taken up again.

Behind each layer, `resume.json` says what stands in the weights file, and `stream-N.npz` holds the
calibration texts' stream. Both are replaced by renaming, so that a cut at any moment leaves a pair
that belongs together; bytes of the weights file behind what is recorded are written again.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.formats import Formats
from pagelet.exporter.options import ExportOptions
from pagelet.exporter.original import ORIGINAL_PREFIX
from pagelet.exporter.stacked_rows import WeightFormat
from pagelet.exporter.stream import Stream
from pagelet.exporter.weights import WEIGHTS_NAME, Linear, StoredTensor, StoredWeights
from pagelet.models.manifest import TensorEntry, hash_file
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat

RESUME_NAME = "resume.json"
FORMATS_NAME = "formats.json"


@dataclass
class Progress:
    """How far an export came: layers that are written, and bytes of the weights file."""

    layers: int
    length: int
    stored: StoredWeights
    stream: Stream | None


def export_key(checkpoint: Checkpoint, options: ExportOptions) -> str:
    """Equal for exports that write the same bytes: the same version, files, adapter, options, calibration."""
    source = checkpoint.path
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    if options.calibration is not None:
        files.append(options.calibration)
    stats = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
        if path.is_file()
    ]
    unlike = replace(options, force=False, accept_loss=False, certificate_seconds=None, max_kl=None)
    return repr((version("pagelet"), stats, checkpoint.describe().get("adapter"), unlike))


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def save_progress(folder: Path, key: str, progress: Progress) -> None:
    """Record it durably; an earlier record is replaced at once. The weights file was synchronized before."""
    old, path = list(folder.glob("stream-*.npz")), _stream(folder, progress.layers)
    if progress.stream is not None:
        data = io.BytesIO()
        arrays: dict[str, Any] = {"residual": progress.stream.residual, **progress.stream.carried}
        np.savez(data, **arrays)
        _replace(path, data.getbuffer())
    record = {
        "key": key,
        "layers": progress.layers,
        "length": progress.length,
        "linears": {name: asdict(linear) for name, linear in progress.stored.linears.items()},
        "vectors": {name: asdict(vector) for name, vector in progress.stored.vectors.items()},
        "entries": {name: asdict(entry) for name, entry in progress.stored.entries.items()},
        "stream": hash_file(path) if progress.stream is not None else "",
    }
    _replace(folder / RESUME_NAME, _sealed(record))
    for other in old:
        if other != path:
            other.unlink()


def load_progress(folder: Path, key: str) -> Progress | None:
    """What `save_progress` wrote into the folder with the same key.

    None: nothing, or of another export, or anything in it was changed since.
    """
    record = _unsealed(folder / RESUME_NAME, key)
    if record is None:
        return None
    weights, path = folder / WEIGHTS_NAME, _stream(folder, record["layers"])
    if not weights.is_file() or weights.stat().st_size < record["length"]:
        return None
    stream = None
    if record["stream"]:
        if not path.is_file() or hash_file(path) != record["stream"]:
            return None
        with np.load(path, allow_pickle=False) as arrays:
            carried = dict(arrays)
        stream = Stream(carried.pop("residual"), carried)
    stored = StoredWeights(
        {name: _linear(value) for name, value in record["linears"].items()},
        {name: _tensor(value) for name, value in record["vectors"].items()},
        {
            name: TensorEntry(**{**value, "shape": tuple(value["shape"])})
            for name, value in record["entries"].items()
        },
    )
    return Progress(record["layers"], record["length"], stored, stream)


def save_formats(folder: Path, key: str, formats: Formats) -> None:
    """Record formats that took long to find."""
    record = {
        "key": key,
        "layers": asdict(formats.layers),
        "tables": asdict(formats.tables),
        "modules": {module: asdict(format) for module, format in formats.modules.items()},
    }
    _replace(folder / FORMATS_NAME, _sealed(record))


def load_formats(folder: Path, key: str) -> Formats | None:
    """What `save_formats` wrote into the folder with the same key, or None."""
    record = _unsealed(folder / FORMATS_NAME, key)
    if record is None:
        return None
    modules = {module: _format(value) for module, value in record["modules"].items()}
    return Formats(_format(record["layers"]), _format(record["tables"]), modules)


def resumes(folder: Path, key: str) -> bool:
    """Whether an export with this key can go on in the folder."""
    return load_formats(folder, key) is not None or load_progress(folder, key) is not None


def clear_progress(folder: Path) -> None:
    """Leave nothing of it in a finished bundle."""
    for path in (*folder.glob("stream-*.npz"), folder / RESUME_NAME, folder / FORMATS_NAME):
        path.unlink(missing_ok=True)
    for path in folder.glob(ORIGINAL_PREFIX + "*"):  # of one that was killed
        shutil.rmtree(path, ignore_errors=True)


def _stream(folder: Path, layers: int) -> Path:
    return folder / f"stream-{layers}.npz"


def _replace(path: Path, data: bytes | memoryview) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)


def _sealed(record: Mapping[str, Any]) -> bytes:
    """JSON behind a line with its SHA-256: what is read again is what was written, or nothing."""
    body = json.dumps(record).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _unsealed(path: Path, key: str) -> dict[str, Any] | None:
    try:
        seal, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(body).hexdigest().encode() != seal:
        return None
    record: dict[str, Any] = json.loads(body)
    return record if record["key"] == key else None


def _tensor(value: Mapping[str, Any]) -> StoredTensor:
    return StoredTensor(**{**value, "shape": tuple(value["shape"])})


def _linear(value: Mapping[str, Any]) -> Linear:
    bias = value["bias"] and _tensor(value["bias"])
    weight = _tensor(value["weight"])
    parameters = tuple(value["activation_parameters"])
    parts = {"format": _format(value["format"]), "weight": weight, "bias": bias}
    return Linear(**{**value, **parts, "activation_parameters": parameters})


def _format(value: Mapping[str, Any]) -> WeightFormat:
    return LinearFormat(**value) if "bits" in value else FloatFormat(**value)
