"""Opening a bundle: check its files, read its tokenizer, load its graph."""

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pagelet.models.errors import BundleError, CancelledError
from pagelet.models.manifest import Manifest, check_files, load_manifest
from pagelet.runtime.backends.base import Backend
from pagelet.runtime.config import EngineConfig
from pagelet.runtime.cores import physical_cores
from pagelet.runtime.tasks import Scoring
from pagelet.runtime.text import Tokenizer

# (stage, fraction of it that is done); False cancels. Stages: "verify", "tokenizer", "session".
OnOpenProgress = Callable[[str, float], bool | None]


def open_bundle(
    folder: Path, config: EngineConfig, verify: bool, on_progress: OnOpenProgress | None
) -> tuple[Backend, Tokenizer, Manifest]:
    """What `Engine.open` does; errors as there. Nothing stays open if it fails or is cancelled."""

    def report(stage: str, fraction: float) -> None:
        if on_progress is not None and on_progress(stage, fraction) is False:
            raise CancelledError(f"opening {folder} was cancelled in stage {stage!r}.")

    manifest = load_manifest(folder)
    _check_files(folder, manifest, verify, report)
    load = _backend_loader(folder, manifest, config)
    # The graph is loaded without the interpreter's lock, which the tokenizer's file is read with.
    with ThreadPoolExecutor(1, "pagelet-open") as pool:
        loading = pool.submit(load)
        try:
            report("tokenizer", 0.0)
            tokenizer = Tokenizer.open(folder, manifest.text)
            report("tokenizer", 1.0)
            report("session", 0.0)
            backend = loading.result()
            report("session", 1.0)
        except BaseException:
            if loading.exception() is None:
                loading.result().close()
            raise
    _trim_heap()
    return backend, tokenizer, manifest


def _trim_heap() -> None:
    """Give the C library's free memory back: reading a tokenizer leaves twice as much as it needs."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc has it
        trim(0)


def _check_files(
    folder: Path, manifest: Manifest, verify: bool, report: Callable[[str, float], None]
) -> None:
    entries = manifest.files.values()
    total = sum(entry.bytes for entry in entries if verify or not entry.weights)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        report("verify", done / total)

    report("verify", 0.0)
    check_files(folder, manifest, weights=verify, on_bytes=on_bytes)


def _backend_loader(folder: Path, manifest: Manifest, config: EngineConfig) -> Callable[[], Backend]:
    """What is quick is checked here; the function that is returned opens the backend."""
    if manifest.target != "cpu":
        raise BundleError(f"{folder} is for the target {manifest.target!r}; this runtime serves 'cpu'.")
    from pagelet.runtime.backends.cpu import CpuBackend, cache_shape

    shape = cache_shape(manifest, config.max_step_tokens)
    context = min(manifest.spec.max_context, config.max_context or manifest.spec.max_context)
    num_bytes = config.cache_bytes(shape.sequence_bytes, context)
    return partial(
        CpuBackend,
        folder / manifest.graph,
        manifest,
        shape.layout(num_bytes, context),
        threads=config.threads or physical_cores(),
        max_rows=config.max_sequences + Scoring.max_chunk,
    )
