"""Which backend runs a bundle. Each is imported when it is opened, and its engine with it."""

from collections.abc import Sequence
from pathlib import Path

from pagelet.models.errors import BackendError
from pagelet.models.manifest import Manifest
from pagelet.runtime.backends.base import Backend
from pagelet.runtime.cache_layout import CacheLayout, CacheShape
from pagelet.runtime.config import EngineConfig, available_memory
from pagelet.runtime.cores import physical_cores


def open_backend(
    folder: Path, manifest: Manifest, layout: CacheLayout, config: EngineConfig, max_rows: int
) -> Backend:
    """The backend of a bundle's target; `max_rows`: the most rows of logits that one step asks for.

    Raises:
        BackendError: the engine is missing, or refuses the bundle.
        BundleError: the bundle is not one for this device.
        CapacityError: the device's memory is too small.
    """
    if manifest.target == "cpu":
        from pagelet.runtime.backends.cpu import CpuBackend

        return CpuBackend(
            folder / manifest.graph,
            manifest,
            layout,
            threads=config.threads or physical_cores(),
            max_rows=max_rows,
        )
    if manifest.target == "cuda":
        from pagelet.runtime.backends.ort_cuda import OrtCudaBackend

        return OrtCudaBackend(folder / manifest.graph, manifest, layout, max_rows=max_rows)
    from pagelet.runtime.backends.tensorrt import TensorRTBackend

    return TensorRTBackend(folder, manifest, layout, max_rows=max_rows)


def cache_shape(manifest: Manifest, max_step_tokens: int) -> CacheShape:
    """What a cache of this bundle consists of.

    Raises:
        BundleError: the bundle's cache type is not known here.
    """
    if manifest.target == "cpu":
        from pagelet.runtime.backends.cpu import cache_shape

        return cache_shape(manifest, max_step_tokens)
    return CacheShape.of(manifest.spec, manifest.cache_type, manifest.block_size, max_step_tokens)


def cache_memory(manifests: Sequence[Manifest]) -> int:
    """Bytes that are free for the caches of bundles that are about to be opened together.

    On a GPU their weights and logits will lie in the same memory, and what the engine works in, for which an
    eighth of the weights is left; the CPU's are mapped, and take what remains.

    Raises:
        BackendError: there is no such device.
    """
    on_gpu = [manifest for manifest in manifests if manifest.gpu is not None]
    taken = sum(weights_bytes(each) * 9 // 8 + _logits_bytes(each) for each in on_gpu)
    return max(device_memory(manifests[0]) - taken, 0)


def device_memory(manifest: Manifest) -> int:
    """Free bytes of the memory that a bundle's cache would lie in.

    Raises:
        BackendError: there is no such device.
    """
    if manifest.gpu is None:
        return available_memory()
    from pagelet.plugins.cuda_driver import CudaError, Driver
    from pagelet.runtime.backends.device_memory import device_free_memory

    try:
        driver = Driver.open()
        try:
            return device_free_memory(driver)
        finally:
            driver.close()
    except CudaError as error:
        raise BackendError(f"the bundle is for the target {manifest.target!r}: {error}") from error


def weights_bytes(manifest: Manifest) -> int:
    """What is loaded: the engine, or the weights where there is none."""
    engine = manifest.gpu.engine if manifest.gpu else ""
    if engine:
        return manifest.files[engine].bytes
    return sum(entry.bytes for entry in manifest.files.values() if entry.weights)


def _logits_bytes(manifest: Manifest) -> int:
    """Of the most rows that a step may have."""
    rows = manifest.gpu.logits_rows if manifest.gpu else 0
    return 4 * rows * manifest.spec.vocab_size
