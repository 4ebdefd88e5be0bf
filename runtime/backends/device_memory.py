"""What a backend allocates on a device: each piece is asked for with its purpose, and all are freed once."""

import ctypes
from contextlib import suppress

import numpy as np

from pagelet.models.errors import CapacityError
from pagelet.plugins.cuda_driver import CudaError, Driver, OutOfMemory
from pagelet.runtime.backends.base import ByteArray
from pagelet.runtime.config import available_memory

ALIGNMENT = 256  # of every tensor's address: TensorRT's setTensorAddress asks for it, cuMemAlloc gives it


class DeviceMemory:
    """Owns device memory, pinned host memory and one stream, until `free`.

    Attributes:
        driver: of the device; belongs to whoever opened it.
        stream: all work of the backend is put here, in order.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._device: list[int] = []
        self._pinned: list[int] = []
        self.stream = driver.create_stream()
        self._open = True

    def malloc(self, num_bytes: int, purpose: str, remedy: str) -> int:
        """Device memory; its content is undefined.

        Args:
            purpose: what it is for, as a message begins with it: "the KV cache".
            remedy: what a user can do where there is too little: a sentence.

        Raises:
            CapacityError: says how much was asked, how much is free, and the remedy.
        """
        try:
            pointer = self.driver.malloc(num_bytes)
        except OutOfMemory as error:
            raise CapacityError(
                f"{purpose} needs {num_bytes} bytes of the memory of {self.driver.name}, but only "
                f"{device_free_memory(self.driver)} of {self.driver.total_memory} bytes are free. {remedy}"
            ) from error
        self._device.append(pointer)
        return pointer

    def pinned(self, num_bytes: int, purpose: str, remedy: str) -> ByteArray:
        """Host memory that asynchronous copies can use, uint8 [num_bytes]; not to be read after `free`.

        Raises:
            CapacityError: as `malloc`.
        """
        try:
            pointer = self.driver.host_alloc(num_bytes)
        except OutOfMemory as error:
            raise CapacityError(
                f"{purpose} needs {num_bytes} bytes of pinned memory, of which the system has too little. "
                f"{remedy}"
            ) from error
        self._pinned.append(pointer)
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(pointer))

    def free(self) -> None:
        """Free all of it, waiting for what the stream still does. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        # After an error of a kernel every call fails: then the process's end frees what is left.
        with suppress(CudaError):
            self.driver.synchronize(self.stream)
        for pointer in self._pinned:
            with suppress(CudaError):
                self.driver.host_free(pointer)
        for pointer in self._device:
            with suppress(CudaError):
                self.driver.free(pointer)
        with suppress(CudaError):
            self.driver.destroy_stream(self.stream)
        self._device.clear()
        self._pinned.clear()


def device_free_memory(driver: Driver) -> int:
    """Bytes that can be allocated on a device now.

    Where the device shares the system's memory (Jetson), what the driver calls free leaves out what the
    system would give back of its file caches (CUDA for Tegra, "cudaMemGetInfo"); the system knows.
    """
    free = driver.free_memory()
    return max(free, available_memory()) if driver.integrated else free


def aligned(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT, at least one."""
    return max(-(-num_bytes // ALIGNMENT), 1) * ALIGNMENT
