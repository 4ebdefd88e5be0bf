"""The bundle's manifest: what is in the folder, which model it is, and how to trust it.

Both sides share this file: the exporter writes it last, the runtime reads it first.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from pagelet.models.errors import BundleError, CheckpointError
from pagelet.models.spec import ModelSpec, check_limits
from pagelet.models.strict import decode, reject_unknown, require
from pagelet.models.targets import TARGETS, GpuSettings

MANIFEST_NAME = "manifest.json"
FORMAT = "pagelet-bundle"
VERSION = 5
# Keys that a version added; older manifests are read, and lack them.
_ADDED = {3: ("certificate",), 5: ("gpu",)}
_OLDEST = 2
_SPEC_BY_LAYER = 4
# A manifest is a few kilobytes; a larger one is not ours and is not parsed.
MAX_MANIFEST_BYTES = 16 << 20
_CHUNK = 4 << 20
_MAX_STEP = 1 << 14  # rows
_MAX_PATH_CHARACTERS = 1_024
_MAX_NAME_BYTES = 255  # of one part of a path, on the usual file systems


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle: its size in bytes and its SHA-256."""

    bytes: int
    sha256: str
    weights: bool = False  # hashed only on `verify`: opening stays instant


@dataclass(frozen=True)
class TensorEntry:
    """How one stored tensor is held, for `inspect`: its type, its bytes, its exactness."""

    type: str  # "int4", "int8", "fp8", "bf16", "fp16", "fp32"
    shape: tuple[int, ...]
    bytes: int
    group_size: int = 0  # inputs that share a scale; 0: those of an output ("fp8"), or no scale
    symmetric: bool = False
    exact: bool = False  # the checkpoint's own numbers, passed through unchanged
    error: float = 0.0  # root mean square of what rounding changed, over that of the weight


@dataclass(frozen=True)
class Quantization:
    """How the linear weights are stored: a type, and the inputs that share a scale as in TensorEntry."""

    weights: str
    quantizer: str = "none"
    group_size: int = 0
    symmetric: bool = False
    embedding: str = ""  # of the embedding table and the head, where it differs


@dataclass(frozen=True)
class TextSettings:
    """What the tokenizer and the chat template need beside their files."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    special_tokens: dict[str, str] = field(default_factory=dict)  # names a template may use: bos_token, …


@dataclass(frozen=True)
class Manifest:
    spec: ModelSpec
    quantization: Quantization
    text: TextSettings
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    source: dict[str, Any]  # where the weights came from: kind, name, files with sizes
    graph: str = "model.onnx"
    target: str = "cpu"
    block_size: int = 32
    cache_type: str = "f32"
    generation: dict[str, Any] = field(default_factory=dict)  # the checkpoint's own sampling defaults
    created_by: str = ""
    certificate: str = ""  # the file's name; "": none was made
    gpu: GpuSettings | None = None  # of targets that have one
    version: int = VERSION  # of the file that it was read from

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "version": VERSION}

    def to_text(self) -> str:
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"

    def save(self, folder: Path) -> None:
        (folder / MANIFEST_NAME).write_text(self.to_text(), encoding="utf-8")

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over the graph's and the weights' hashes: equal exactly when the values are."""
        digest = hashlib.sha256()
        for name in sorted(self.files):
            is_engine = self.gpu is not None and name == self.gpu.engine  # two builds differ in their bytes
            if (self.files[name].weights and not is_engine) or name == self.graph:
                digest.update(f"{name}={self.files[name].sha256};".encode())
        return digest.hexdigest()


def hash_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a file; `on_bytes` is told of each chunk's size."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            if on_bytes:
                on_bytes(len(chunk))
    return digest.hexdigest()


def load_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`; no other file is opened.

    Raises:
        BundleError: no bundle, damaged, of a newer version, or with paths that leave the folder.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST_NAME}. Make one with `pagelet export`."
        )
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise BundleError(
            f"{path} has {path.stat().st_size} bytes; a manifest has at most {MAX_MANIFEST_BYTES}."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not valid JSON ({error}); export the bundle again.") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BundleError(f"{path} is not a pagelet manifest (its 'format' is not {FORMAT!r}).")
    version = require(data, "version", int, str(path), BundleError)
    if not _OLDEST <= version <= VERSION:
        advice = "update pagelet" if version > VERSION else "export it again"
        raise BundleError(
            f"{path} has version {version}; this pagelet reads versions {_OLDEST} to {VERSION}: {advice}."
        )
    later = {key for added, keys in _ADDED.items() if added > version for key in keys}
    known = [field.name for field in fields(Manifest) if field.name not in later]
    reject_unknown(data, ["format", *known], str(path), BundleError)
    return _parse(data, str(path))


def _parse(data: dict[str, Any], where: str) -> Manifest:
    body = {key: value for key, value in data.items() if key != "format"}
    if body["version"] < _SPEC_BY_LAYER and isinstance(body.get("spec"), dict):
        try:
            body["spec"] = _by_layer(body["spec"], where)
        except CheckpointError as error:
            raise BundleError(f"{where}: {error}") from error
    try:
        manifest = decode(Manifest, body, where, BundleError)
    except CheckpointError as error:
        raise BundleError(f"{where}: {error}") from error
    for name in manifest.files:
        _check_path(name, where)
    if manifest.graph not in manifest.files:
        raise BundleError(f"{where}: the graph {manifest.graph!r} is not among its files.")
    if manifest.certificate and manifest.certificate not in manifest.files:
        raise BundleError(f"{where}: the certificate {manifest.certificate!r:.80} is not among its files.")
    _check_target(manifest, where)
    if not 1 <= manifest.block_size <= 4096:
        raise BundleError(f"{where}: block_size is {manifest.block_size}; expected 1 to 4096.")
    return manifest


def _check_target(manifest: Manifest, where: str) -> None:
    target = TARGETS.get(manifest.target)
    if target is None:
        raise BundleError(
            f"{where}: the target is {manifest.target!r:.80}; this pagelet knows {', '.join(TARGETS)}: "
            "update pagelet, or export the bundle again."
        )
    gpu = manifest.gpu
    if (gpu is not None) != target.is_gpu:
        raise BundleError(f"{where}: settings of a GPU do not go with the target {target.name!r}.")
    if gpu is None:
        return
    if gpu.engine and gpu.engine not in manifest.files:
        raise BundleError(f"{where}: the engine {gpu.engine!r:.80} is not among its files.")
    if gpu.kernels:
        _check_path(gpu.kernels, where)
    if gpu.engine and (not gpu.engine.endswith(".engine") or not target.has_kernels):
        raise BundleError(f"{where}: {gpu.engine!r:.80} is no engine of the target {target.name!r}.")
    if manifest.cache_type not in target.caches:
        raise BundleError(f"{where}: the target {target.name!r} has no cache {manifest.cache_type!r:.80}.")
    sizes = (gpu.max_sequences, gpu.decode_tokens, gpu.step_tokens, gpu.logits_rows)
    in_range = (
        gpu.activations in ("f16", "bf16")
        and all(1 <= size <= _MAX_STEP for size in sizes)
        and gpu.max_sequences <= gpu.decode_tokens <= gpu.step_tokens
        and set(gpu.engine_sms) <= set(gpu.sms) <= set(target.sms)
        and bool(gpu.sms) == bool(gpu.kernels) == target.has_kernels
    )
    if not in_range:
        raise BundleError(f"{where}: the GPU's settings are out of range: {gpu!r:.200}.")


def _by_layer(old: dict[str, Any], where: str) -> dict[str, Any]:
    """The spec of a manifest before version 4, all whose layers were alike but for their windows."""
    spec = dict(old)
    count = require(spec, "num_layers", int, where, BundleError)
    head_dim, heads = (require(spec, key, int, where, BundleError) for key in ("head_dim", "num_heads"))
    check_limits(num_layers=count, head_dim=head_dim, num_heads=heads)
    windows = spec.pop("layer_windows", None) or [0] * count
    if not isinstance(windows, list) or len(windows) != count:
        raise BundleError(f"{where}: {windows!r:.80} are no windows for {count} layers.")
    same = {key: spec.pop(key, None) for key in ("num_kv_heads", "head_dim", "intermediate_size")}
    bias, mlp_bias = spec.pop("attention_bias", False), spec.pop("mlp_bias", False)
    epsilon, rope = spec.pop("norm_epsilon", None), spec.pop("rope", None)
    del spec["num_layers"], spec["num_heads"]
    return {
        **spec,
        "norm": {"epsilon": epsilon},
        "attention": {"num_heads": heads, "scale": head_dim**-0.5, "bias": bias, "output_bias": bias},
        "mlp": {"bias": mlp_bias},
        "layers": [{**same, "window": window} for window in windows],
        "ropes": [rope],
    }


def _check_path(name: str, where: str) -> None:
    """A file's path must stay inside the bundle, on every system."""
    path = PurePosixPath(name)
    escapes = path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name
    if name in ("", ".") or escapes or str(path) != name or "\0" in name:
        raise BundleError(f"{where}: file path {name!r} leaves the bundle's folder or is not plain; refused.")
    if len(name) > _MAX_PATH_CHARACTERS or any(len(part.encode()) > _MAX_NAME_BYTES for part in path.parts):
        raise BundleError(
            f"{where}: file path {name!r:.80} is too long; expected at most {_MAX_NAME_BYTES} bytes per part "
            f"and {_MAX_PATH_CHARACTERS} characters in all."
        )


def check_files(
    folder: Path, manifest: Manifest, *, weights: bool = False, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Compare the folder with the manifest: every size, and the hashes (the weights' only if asked).

    Raises:
        BundleError: names the first file that is missing, unreadable, a link out, or of another size or hash.
    """
    for name, entry in manifest.files.items():
        with _readable(folder / name):
            _check_file(folder, name, entry)
    for name, entry in manifest.files.items():
        if entry.weights and not weights:
            continue
        with _readable(folder / name):
            found = hash_file(folder / name, on_bytes)
        if found != entry.sha256:
            raise BundleError(
                f"{folder / name} does not have the manifest's SHA-256: changed. Export or copy it again."
            )


def _check_file(folder: Path, name: str, entry: FileEntry) -> None:
    path = folder / name
    if not path.is_file():
        raise BundleError(f"{path} is missing; the bundle is incomplete. Export or copy it again.")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BundleError(f"{path} links to a file outside the bundle; refused.")
    if (size := path.stat().st_size) != entry.bytes:
        raise BundleError(
            f"{path} has {size} bytes, the manifest says {entry.bytes}: "
            "truncated or changed. Export or copy it again."
        )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """The file system's errors become a BundleError that names the file."""
    try:
        yield
    except OSError as error:
        raise BundleError(
            f"{path} cannot be read: {error.strerror or error}. Export or copy it again."
        ) from error
