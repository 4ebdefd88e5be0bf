"""A GPU for checks: its driver, one stream, arrays that go there and come back, and its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagelet.plugins.cuda_driver import CudaError, Driver
from pagelet.tools.gpu.report import Figure, Row

Array = NDArray[Any]
_PACKAGES = (
    "triton",
    "cuda-bindings",
    "tensorrt",
    "tensorrt-cu13",
    "tensorrt-rtx-cu13",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "numpy",
)
_EXTRA = 256  # bytes behind each array, by which an overrun is noticed
_NAN = 0xFF  # in every byte: NaN as floats


class Library(Protocol):
    """What launches kernels: a `KernelLibrary`."""

    def run(self, variant: Any, shapes: Any, tensors: Any, workspace: int, stream: int) -> None:
        """Put a node's step into a stream."""


class Gpu:
    """An open device.

    Args:
        driver: belongs to this object from here on.
        kernels: where the compiled kernels are; None: there are none.
        open_library: makes a `Library` of the folder and the driver; None: a `KernelLibrary`.
    """

    def __init__(
        self,
        driver: Driver,
        kernels: Path | None,
        open_library: Callable[[Path, Driver], Library] | None = None,
    ) -> None:
        self.driver = driver
        self.stream = driver.create_stream()
        self._kernels, self._open_library = kernels, open_library or _kernel_library
        self._library: Library | None = None

    @property
    def library(self) -> Library:
        """
        Raises:
            KernelError: the folder of kernels is damaged, or for other GPUs.
            Missing: there is no folder.
        """
        if self._kernels is None:
            raise Missing("no kernels: triton is not installed, and --kernels names no folder")
        if self._library is None:
            self._library = self._open_library(self._kernels, self.driver)
        return self._library

    @contextmanager
    def memory(self) -> Iterator[DeviceArrays]:
        """Arrays on the device that are freed at the end of the block."""
        arrays = DeviceArrays(self.driver, self.stream)
        try:
            yield arrays
        finally:
            arrays.free()

    def wait(self) -> None:
        self.driver.synchronize(self.stream)


class Missing(RuntimeError):
    """There is nothing to run."""


class DeviceArrays:
    """Arrays on the device, freed together."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._sizes: dict[int, int] = {}

    def allocate(self, num_bytes: int, byte: int | None = _NAN) -> int:
        """Memory filled with a byte, by default one of which NaN is made. None: left as it is."""
        pointer = self._driver.malloc(num_bytes + _EXTRA)
        self._sizes[pointer] = num_bytes
        if byte is not None and num_bytes:
            self._driver.memset(pointer, byte, num_bytes, self._stream)
        self._driver.memset(pointer + num_bytes, _NAN, _EXTRA, self._stream)
        return pointer

    def upload(self, array: Array) -> int:
        pointer = self.allocate(array.nbytes)
        self.write(pointer, array)
        return pointer

    def write(self, pointer: int, array: Array) -> None:
        """Copies, and waits until that is done: the array may change afterwards."""
        whole = np.ascontiguousarray(array)
        if whole.nbytes:
            self._driver.to_device(pointer, whole.ctypes.data, whole.nbytes, self._stream)
            self._driver.synchronize(self._stream)

    def fill(self, num_bytes: int, part: Array) -> int:
        """New memory in which an array is repeated as often as it fits."""
        pointer = self.allocate(num_bytes, None)
        whole = np.ascontiguousarray(part).reshape(-1).view(np.uint8)[:num_bytes]
        self.write(pointer, whole)
        done = whole.nbytes
        while done < num_bytes:
            more = min(done, num_bytes - done)
            self._driver.on_device(pointer + done, pointer, more, self._stream)
            done += more
        return pointer

    def read(self, pointer: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """What the device has there when everything in the stream is done."""
        array = np.empty(shape, dtype)
        if array.nbytes:
            self._driver.to_host(array.ctypes.data, pointer, array.nbytes, self._stream)
        self._driver.synchronize(self._stream)
        return array

    def overrun(self) -> int:
        """How many arrays were written beyond their end."""
        ends = (self.read(pointer + size, (_EXTRA,), np.uint8) for pointer, size in self._sizes.items())
        return sum(int((end != _NAN).any()) for end in ends)

    def free(self) -> None:
        sizes, self._sizes = self._sizes, {}
        with suppress(CudaError):  # after an error of a kernel every call fails: the process's end frees
            self._driver.synchronize(self._stream)
            for pointer in sizes:
                self._driver.free(pointer)


def check_device(gpu: Gpu) -> Row:
    """What is here: the first thing that is wanted when something else fails."""
    driver = gpu.driver
    figures: dict[str, Figure] = {
        "name": driver.name,
        "sm": driver.compute_capability,
        "multiprocessors": driver.multiprocessors,
        "memory_bytes": driver.total_memory,
        "free_bytes": driver.free_memory(),
        "driver": driver_version(),
        "driver_cuda": driver_cuda(),
    }
    for package in _PACKAGES:
        try:
            figures[package] = version(package)
        except PackageNotFoundError:
            figures[package] = None
    figures["onnxruntime_providers"] = _providers()
    sizes = f"{driver.multiprocessors} multiprocessors, {driver.total_memory / 2**30:.1f} GiB"
    found = ", ".join(f"{name} {figures[name]}" for name in _PACKAGES if figures[name])
    serves = f"driver {figures['driver'] or '?'} for CUDA {figures['driver_cuda'] or '?'}"
    detail = f"{driver.name}, SM {driver.compute_capability}, {sizes}, {serves}; {found}"
    return Row("device", "ok", detail, figures=figures)


def driver_version() -> str | None:
    """As NVIDIA numbers it, "580.65.06"; None where Linux does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else None


def driver_cuda() -> str | None:
    """The newest CUDA that the driver serves, "13.0"; None where it does not say."""
    try:
        from cuda.bindings import driver

        code, number = driver.cuDriverGetVersion()
    except Exception:  # what the bindings raise where there is no libcuda differs by version
        return None
    return f"{number // 1000}.{number % 1000 // 10}" if code == 0 else None


def _providers() -> str | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    return " ".join(onnxruntime.get_available_providers())


def _kernel_library(folder: Path, driver: Driver) -> Library:
    from pagelet.plugins.kernels.library import KernelLibrary

    return KernelLibrary(folder, driver)
