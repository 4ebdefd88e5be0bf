"""`pagelet build`: the engine of a bundle for TensorRT, on the device that will run it; or one made anew."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagelet.models.engine_profiles import engine_profiles
from pagelet.models.errors import BackendError, BundleError, CapacityError, InputError
from pagelet.models.manifest import MANIFEST_NAME, FileEntry, Manifest, check_files, hash_file, load_manifest
from pagelet.models.targets import FIRST_FP8_SM, MOST_WORKSPACE, RTX_SMS, GpuSettings, build_bytes
from pagelet.plugins.tensorrt.build import (
    PACKAGES,
    BuiltEngine,
    OnPhase,
    PluginError,
    TensorRTError,
    build_engine,
    engine_version,
)
from pagelet.plugins.tensorrt.runtime_library import import_tensorrt
from pagelet.runtime.config import available_memory

ENGINE_STEM, TIMING_NAME = "model", "model.timing"


def build_bundle(
    folder: Path,
    *,
    sm: int | None = None,
    rebuild: bool = False,
    workspace: int | None = None,
    on_phase: OnPhase | None = None,
) -> Manifest:
    """Build the engine of a bundle for "rtx" or "tensorrt" and record it in the manifest.

    The bundle is as it was until the engine is whole.

    Args:
        sm: the GPU's compute capability, times ten. Needed for TensorRT, which builds for the GPU that is
            here; None (rtx): those of the export.
        rebuild: also where there is an engine that fits.
        workspace: bytes that a layer may use beside its inputs and outputs; None: a quarter of what is free,
            at most 1 GiB.

    Raises:
        InputError: the bundle's target has no engine.
        BundleError: the bundle is damaged, its kernels are not for this GPU, or its engine fits already.
        CapacityError: building needs more memory than is free.
        BackendError: TensorRT is missing, or fails.
    """
    manifest = load_manifest(folder)
    gpu = manifest.gpu
    if gpu is None or manifest.target not in PACKAGES:
        raise InputError(f"{folder} is for the target {manifest.target!r}, which has no engine to build.")
    check_files(folder, replace(manifest, files=_sources(manifest)))
    sms = _devices(folder, manifest, gpu, sm)
    version = _version(manifest.target)
    fits = gpu.engine_version == version and set(sms) <= set(gpu.engine_sms)
    if fits and not rebuild and _is_whole(folder, manifest):
        raise BundleError(f"{folder} has an engine for {_names(sms)} by {version}; --rebuild makes it anew.")
    workspace = _workspace(folder, manifest, workspace)
    built = _build(folder, manifest, sms, workspace, on_phase)
    return _record(folder, manifest, gpu, built, sms)


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether the engine's file is as the manifest says."""
    try:
        check_files(folder, manifest)
    except BundleError:
        return False
    return True


def _sources(manifest: Manifest) -> dict[str, FileEntry]:
    """All files but the engine, which may be the very reason for building."""
    engine = manifest.gpu.engine if manifest.gpu else ""
    return {name: entry for name, entry in manifest.files.items() if name != engine}


def _devices(folder: Path, manifest: Manifest, gpu: GpuSettings, sm: int | None) -> tuple[int, ...]:
    sms = gpu.sms if sm is None else (sm,)
    if foreign := sorted(set(sms) - set(gpu.sms)):
        raise BundleError(
            f"{folder} has attention kernels for {_names(gpu.sms)}, not for {_names(foreign)}: export it "
            f"again with --sm {','.join(map(str, sorted({*gpu.sms, *foreign})))}."
        )
    if manifest.target == "rtx" and (unknown := sorted(set(sms) - set(RTX_SMS))):
        raise BundleError(f"TensorRT-RTX builds nothing for {_names(unknown)}.")
    if manifest.quantization.weights == "fp8" and (old := [each for each in sms if each < FIRST_FP8_SM]):
        raise BundleError(
            f"{folder} has fp8 weights, which need SM {FIRST_FP8_SM} or newer; the GPU is {_names(old)}: "
            "export it again with --weights int4."
        )
    if manifest.target == "tensorrt" and sm is None:
        raise InputError("TensorRT builds for the GPU that is here, and none was named.")
    return tuple(sms)


def _version(target: str) -> str:
    try:
        return engine_version(target, import_tensorrt(PACKAGES[target]))
    except TensorRTError as error:
        raise BackendError(str(error)) from error


def _workspace(folder: Path, manifest: Manifest, asked: int | None) -> int:
    """Bytes; with the weights they must fit into what is free."""
    free = available_memory()
    workspace = min(free // 4, MOST_WORKSPACE) if asked is None else asked
    weights = sum(entry.bytes for entry in _sources(manifest).values() if entry.weights)
    if (needed := build_bytes(weights, workspace)) > free:
        raise CapacityError(
            f"building the engine of {folder} takes about {needed} bytes ({weights} of weights, "
            f"twice, and {workspace} of workspace), but only {free} are free. Close other programs, lower "
            "--workspace, or export a smaller model."
        )
    return workspace


def _build(
    folder: Path, manifest: Manifest, sms: Sequence[int], workspace: int, on_phase: OnPhase | None
) -> BuiltEngine:
    gpu = manifest.gpu
    assert gpu is not None
    profiles = engine_profiles(manifest.spec, manifest.cache_type, manifest.block_size, gpu)
    try:
        return build_engine(
            manifest.target,
            folder / manifest.graph,
            profiles,
            sms=sms,
            workspace=workspace,
            timing_cache=folder / TIMING_NAME,
            on_phase=on_phase,
        )
    except (TensorRTError, PluginError) as error:
        raise BackendError(f"no engine was built: {error}") from error


def _record(
    folder: Path, manifest: Manifest, gpu: GpuSettings, built: BuiltEngine, sms: Sequence[int]
) -> Manifest:
    """First an engine of a new name, then the manifest that knows it; the old engine goes last."""
    try:
        with _new_file(folder, built.data) as new:
            entry = FileEntry(new.stat().st_size, hash_file(new), weights=True)
            name = f"{ENGINE_STEM}-{entry.sha256[:8]}.engine"
            new.replace(folder / name)
        settings = replace(gpu, engine=name, engine_version=built.version, engine_sms=tuple(sms))
        manifest = replace(manifest, files={**_sources(manifest), name: entry}, gpu=settings)
        with _new_file(folder, manifest.to_text().encode()) as new:
            new.replace(folder / MANIFEST_NAME)
        if gpu.engine and gpu.engine != name:
            (folder / gpu.engine).unlink(missing_ok=True)
    except OSError as error:
        raise BundleError(f"writing the engine into {folder} failed: {error.strerror or error}.") from error
    return manifest


@contextmanager
def _new_file(folder: Path, data: Any) -> Iterator[Path]:
    """A file that no link or other build stands for; gone behind the block unless it was renamed."""
    handle, name = tempfile.mkstemp(prefix=".build-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _names(sms: Sequence[int]) -> str:
    return "SM " + ", ".join(map(str, sms))
