"""A CUDA driver without a device: what `pagelet.plugins.cuda_driver` calls, in the shape of cuda-bindings.

Its device memory is host memory, so copies are real. What is put into a stream runs only when somebody waits
for the stream: whoever changes a buffer too early, or frees what is still read, is found out. Memory that was
freed is never given out again, and whoever uses it fails.
"""

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Work = Callable[[], None]
# What a launch of a function runs: f(grid, threads, shared, values), the arguments as uint64.
Kernel = Callable[[tuple[int, int, int], int, int, NDArray[np.uint64]], None]

_CONTEXT = 7
_FREED, _UNWRITTEN = 0xDD, 0xCB
_WITHOUT_CONTEXT = {
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxSetCurrent",
}


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901


OK = CUresult.CUDA_SUCCESS
# After these nothing works any more in the process.
_FATAL = (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, CUresult.CUDA_ERROR_LAUNCH_FAILED)


@dataclass
class Stream:
    """Work that waits; what is being captured instead of it."""

    waiting: deque[Work] = field(default_factory=deque)
    captured: list[Work] | None = None


class FakeCuda:
    """Pass it as `bindings`. Handles are numbers that are never used twice.

    Attributes:
        calls: (name, arguments) of each call, in order.
        memory, pinned: what is allocated: address to the bytes.
        functions: of a module, by their entry: how many arguments one has, and what it does.
    """

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
        CU_DEVICE_ATTRIBUTE_INTEGRATED=18,
    )

    def __init__(
        self,
        *,
        sm: int = 89,
        total_memory: int = 1 << 30,
        devices: int = 1,
        integrated: bool = False,
        functions: dict[str, tuple[int, Kernel]] | None = None,
    ) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.memory: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, Stream] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.executables: dict[int, list[Work]] = {}
        self.modules: dict[int, bytes] = {}
        self.retained = 0
        self.total_memory = total_memory
        self.functions = functions or {}
        self.shared_allowed: dict[int, int] = {}
        self._attributes = {75: sm // 10, 76: sm % 10, 16: 24, 18: int(integrated)}
        self._devices = devices
        self._entries: dict[int, str] = {}
        self._next = 1 << 40
        self._graveyard: dict[int, Any] = {}
        self._counts: Counter[str] = Counter()
        self._failures: dict[tuple[str, int], CUresult] = {}
        self._lost: CUresult | None = None
        self._current = threading.local()

    # For tests

    def fail(self, name: str, code: CUresult, nth: int = 1) -> None:
        """Let the n-th call of a function from now on fail; a fatal error makes all later ones fail too."""
        self._failures[name, self._counts[name] + nth] = code

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    @property
    def used_memory(self) -> int:
        return sum(map(ctypes.sizeof, self.memory.values()))

    def assert_nothing_is_left(self) -> None:
        for what in ("memory", "pinned", "streams", "graphs", "executables", "modules", "retained"):
            assert not getattr(self, what), f"{what} was not given back: {getattr(self, what)}"

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A view of allocated device memory."""
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._check_device(address, num_bytes)
        if not num_bytes:
            return np.empty(shape, dtype)
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)

    def enqueue(self, stream: int, work: Work) -> None:
        """Put work into a stream, or into the graph that is captured from it."""
        state = self.streams[stream]
        (state.waiting if state.captured is None else state.captured).append(work)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        implementation = getattr(type(self), f"_{name}")

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            self._counts[name] += 1
            code = self._failures.pop((name, self._counts[name]), self._lost)
            if code is None and name not in _WITHOUT_CONTEXT and not self._is_current():
                code = CUresult.CUDA_ERROR_INVALID_CONTEXT
            if code is None:
                result: tuple[Any, ...] = implementation(self, *arguments)
                return result
            if code in _FATAL:
                self._lost = code
            if name == "cuStreamEndCapture":
                self.streams[arguments[0]].captured = None
            return code, None

        return call

    # The device

    def _is_current(self) -> bool:
        return self.retained > 0 and getattr(self._current, "context", None) == _CONTEXT

    def _cuInit(self, flags: int) -> tuple[Any, ...]:
        return (OK if self._devices else CUresult.CUDA_ERROR_NO_DEVICE,)

    def _cuDeviceGetCount(self) -> tuple[Any, ...]:
        return OK, self._devices

    def _cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return OK, ordinal

    def _cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return OK, b"Fake RTX".ljust(length, b"\0")

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return OK, self._attributes[attribute]

    def _cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return OK, self.total_memory

    def _cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.retained += 1
        return OK, _CONTEXT

    def _cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        assert self.retained, "released more often than retained"
        self.retained -= 1
        return (OK,)

    def _cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        self._current.context = context
        return (OK,)

    # Memory

    def _cuMemGetInfo(self) -> tuple[Any, ...]:
        return OK, self.total_memory - self.used_memory, self.total_memory

    def _cuMemAlloc(self, num_bytes: int) -> tuple[Any, ...]:
        if num_bytes <= 0:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        if self.used_memory + num_bytes > self.total_memory:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return OK, self._allocate(self.memory, num_bytes)

    def _cuMemHostAlloc(self, num_bytes: int, flags: int) -> tuple[Any, ...]:
        return OK, self._allocate(self.pinned, num_bytes)

    def _allocate(self, where: dict[int, Any], num_bytes: int) -> int:
        block = (ctypes.c_uint8 * (num_bytes + 256))()
        offset = -ctypes.addressof(block) % 256  # CUDA's addresses are aligned so
        memory = (ctypes.c_uint8 * num_bytes).from_buffer(block, offset)
        address = ctypes.addressof(memory)
        ctypes.memset(address, _UNWRITTEN, num_bytes)
        where[address] = memory
        return address

    def _cuMemFree(self, address: int) -> tuple[Any, ...]:
        return self._bury(self.memory, address)

    def _cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        return self._bury(self.pinned, address)

    def _bury(self, where: dict[int, Any], address: int) -> tuple[Any, ...]:
        if address not in where:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        memory = self._graveyard[address] = where.pop(address)
        ctypes.memset(address, _FREED, ctypes.sizeof(memory))
        return (OK,)

    def _check_device(self, address: int, num_bytes: int) -> None:
        assert _holds(self.memory, address, num_bytes), f"{num_bytes} bytes at {address:#x} are not allocated"

    def _check_host(self, address: int, num_bytes: int) -> None:
        assert not _holds(self._graveyard, address, 0), f"host memory at {address:#x} was freed"

    def _cuMemcpyHtoDAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[Any, ...]:
        def work() -> None:
            self._check_device(target, num_bytes)
            self._check_host(source, num_bytes)
            ctypes.memmove(target, source, num_bytes)

        self.enqueue(stream, work)
        return (OK,)

    def _cuMemcpyDtoHAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[Any, ...]:
        def work() -> None:
            self._check_device(source, num_bytes)
            self._check_host(target, num_bytes)
            ctypes.memmove(target, source, num_bytes)

        self.enqueue(stream, work)
        return (OK,)

    def _cuMemcpyDtoDAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[Any, ...]:
        def work() -> None:
            self._check_device(target, num_bytes)
            self._check_device(source, num_bytes)
            assert abs(target - source) >= num_bytes, "a copy within the device overlaps itself"
            ctypes.memmove(target, source, num_bytes)

        self.enqueue(stream, work)
        return (OK,)

    def _cuMemsetD8Async(self, address: int, byte: int, count: int, stream: int) -> tuple[Any, ...]:
        def work() -> None:
            self._check_device(address, count)
            ctypes.memset(address, byte, count)

        self.enqueue(stream, work)
        return (OK,)

    # Streams and graphs

    def _new(self, where: dict[int, Any], value: Any) -> int:
        self._next += 1
        where[self._next] = value
        return self._next

    def _cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        assert flags == self.CUstream_flags.CU_STREAM_NON_BLOCKING
        return OK, self._new(self.streams, Stream())

    def _cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        assert not self.streams.pop(stream).waiting, "a stream was destroyed before its work was done"
        return (OK,)

    def _cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        state = self.streams[stream]
        if state.captured is not None:
            return (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        while state.waiting:
            state.waiting.popleft()()
        return (OK,)

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        assert not self.streams[stream].waiting, "a capture began before the work before it was done"
        self.streams[stream].captured = []
        return (OK,)

    def _cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        captured, self.streams[stream].captured = self.streams[stream].captured, None
        if captured is None:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        return OK, self._new(self.graphs, captured)

    def _cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        return OK, self._new(self.executables, self.graphs[graph])

    def _cuGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        del self.graphs[graph]
        return (OK,)

    def _cuGraphLaunch(self, executable: int, stream: int) -> tuple[Any, ...]:
        for work in self.executables[executable]:
            self.enqueue(stream, work)
        return (OK,)

    def _cuGraphExecDestroy(self, executable: int) -> tuple[Any, ...]:
        del self.executables[executable]
        return (OK,)

    # Kernels

    def _cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        if not image.startswith(b"\x7fELF"):
            return CUresult.CUDA_ERROR_INVALID_IMAGE, None
        return OK, self._new(self.modules, image)

    def _cuModuleUnload(self, module: int) -> tuple[Any, ...]:
        del self.modules[module]
        return (OK,)

    def _cuModuleGetFunction(self, module: int, entry: bytes) -> tuple[Any, ...]:
        assert module in self.modules
        if entry.decode() not in self.functions:
            return CUresult.CUDA_ERROR_NOT_FOUND, None
        return OK, self._new(self._entries, entry.decode())

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> tuple[Any, ...]:
        assert attribute == self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.shared_allowed[function] = value
        return (OK,)

    def _cuLaunchKernel(
        self,
        function: int,
        x: int,
        y: int,
        z: int,
        threads: int,
        threads_y: int,
        threads_z: int,
        shared: int,
        stream: int,
        parameters: int,
        extra: int,
    ) -> tuple[Any, ...]:
        assert (threads_y, threads_z, extra) == (1, 1, 0)
        if shared > max(48 << 10, self.shared_allowed.get(function, 0)):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        count, kernel = self.functions[self._entries[function]]
        pointers = (ctypes.c_uint64 * count).from_address(parameters)
        # As CUDA does, before the call returns.
        values = np.array([ctypes.c_uint64.from_address(pointer).value for pointer in pointers], np.uint64)
        self.enqueue(stream, lambda: kernel((x, y, z), threads, shared, values))
        return (OK,)


def _holds(allocations: dict[int, Any], address: int, num_bytes: int) -> bool:
    return any(
        start <= address and address + max(num_bytes, 1) <= start + ctypes.sizeof(memory)
        for start, memory in allocations.items()
    )
