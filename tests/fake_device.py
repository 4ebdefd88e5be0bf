"""A device of paper with TensorRT, and steps for backends: a `FakeCuda`, a `FakeTensorRT`, what is opened."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from fake_cuda import FakeCuda
from fake_tensorrt import FakeAttention, FakeTensorRT, as_gpu_bundle
from numpy.typing import NDArray

from pagelet.models.manifest import load_manifest
from pagelet.plugins.cuda_driver import Driver
from pagelet.runtime.backends import StepBatch
from pagelet.runtime.backends.cpu import CpuBackend, cache_shape
from pagelet.runtime.backends.device_memory import DeviceMemory
from pagelet.runtime.backends.tensorrt import TensorRTBackend

BLOCK_SIZE = 8
MAX_ROWS = 144


@dataclass
class Device:
    """A device of paper, and what is opened on it."""

    cuda: FakeCuda
    trt: FakeTensorRT
    folder: Path
    attention: FakeAttention = field(default_factory=FakeAttention)
    opened: list[TensorRTBackend] = field(default_factory=list)

    def open(
        self,
        bundle: Path,
        *,
        kv_bytes: int = 1 << 20,
        max_rows: int = MAX_ROWS,
        change: Any = None,
        **settings: Any,
    ) -> TensorRTBackend:
        """Open a bundle for the CPU as one for this device; `change` are other fields of its manifest."""
        folder, manifest = as_gpu_bundle(
            bundle, self.folder / f"{len(self.opened)}-{bundle.name}", **settings
        )
        manifest = replace(manifest, **(change or {}))
        backend = TensorRTBackend(
            folder,
            manifest,
            cache_shape(manifest, max_step_tokens=128).layout(kv_bytes, manifest.spec.max_context),
            max_rows=max_rows,
            driver=Driver.open(bindings=self.cuda),
            trt=self.trt,
            load_attention=self.attention.load,
        )
        self.opened.append(backend)
        return backend

    def step_calls(self) -> list[str]:
        """What was called since the last time, but for the thread's context."""
        names = [name for name in self.cuda.names() if name != "cuCtxSetCurrent"]
        self.cuda.calls.clear()
        return names

    def assert_nothing_is_left(self) -> None:
        self.cuda.assert_nothing_is_left()
        self.trt.assert_nothing_is_left()
        assert not self.attention.open


@contextmanager
def open_device(folder: Path, *, rtx: bool = True, **cuda: Any) -> Iterator[Device]:
    """A device on which nothing may be left at the end; bundles are written into `folder`."""
    fake = FakeCuda(**cuda)
    device = Device(fake, FakeTensorRT(fake, rtx=rtx), folder)
    yield device
    for backend in device.opened:
        backend.close()
    device.assert_nothing_is_left()


@contextmanager
def open_memory(**cuda: Any) -> Iterator[DeviceMemory]:
    """A device's memory alone."""
    driver = Driver.open(bindings=FakeCuda(**cuda))
    memory = DeviceMemory(driver)
    yield memory
    memory.free()
    driver.close()


def open_cpu(bundle: Path) -> CpuBackend:
    manifest = load_manifest(bundle)
    layout = cache_shape(manifest, max_step_tokens=64).layout(1 << 20, manifest.spec.max_context)
    return CpuBackend(bundle / manifest.graph, manifest, layout, threads=1, max_rows=MAX_ROWS)


def tokens_of(count: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(2, 320, count)


def batch_of(
    *sequences: tuple[int, int, int],
    groups: int = 1,
    width: int = 12,
    rows: list[int] | None = None,
    mask: NDArray[np.int32] | None = None,
) -> StepBatch:
    """A step of sequences (first block, past, rows): tokens by position, logits of the last row of each."""
    counts = [count for _, _, count in sequences]
    ends = np.cumsum(counts)
    blocks = [np.arange(first, first + width) for first, _, _ in sequences]
    needed = [-(-(past + count) // BLOCK_SIZE) for _, past, count in sequences]
    table = np.array(
        [np.where(np.arange(width) < n, row, -1) for n, row in zip(needed, blocks, strict=True)], np.int32
    )
    positions = np.concatenate([np.arange(past, past + count) for _, past, count in sequences])
    return StepBatch(
        np.concatenate([tokens_of(600, first)[past : past + count] for first, past, count in sequences]),
        positions,
        np.array([0, *ends], np.int32),
        np.array([past for _, past, _ in sequences], np.int32),
        (table,) * groups,
        np.array(ends - 1 if rows is None else rows),
        mask,
    )
