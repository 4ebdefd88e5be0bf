"""Driver: the few calls of CUDA's driver API that GPU targets need, over NVIDIA's `cuda-bindings`.

Nothing is compiled and no toolkit is needed: the driver is what every machine with an NVIDIA GPU has. The
device's primary context is used, which is the one that TensorRT and ONNX Runtime use too, so pointers and
streams are valid in all of them. Every handle (pointer, stream, module, function, graph) is an int.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

_SUCCESS = 0
_OUT_OF_MEMORY = 2
_INTEGERS = ("i32", "i64")


class CudaError(RuntimeError):
    """A call of the driver failed.

    Attributes:
        code: CUDA's number of the error; 0 where CUDA could not even be asked.
        name: CUDA's name of it, such as "CUDA_ERROR_LAUNCH_FAILED"; "" likewise.
    """

    def __init__(self, message: str, code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class OutOfMemory(CudaError):
    """The device, or pinned host memory, has no room for what was asked."""


class Driver:
    """One device and its primary context, held until `close`.

    Every method but `open` needs the context to be current in the calling thread: `open` makes it so for the
    thread that opens, `make_current` for another one. Copies and launches are asynchronous: they are done
    when `synchronize` returns, and an error of one may only be raised there.

    Attributes:
        name: of the device, as NVIDIA calls it.
        compute_capability: ten times its major number plus the minor one: 89 for 8.9.
        multiprocessors: how many it has.
        total_memory: bytes.
        integrated: whether its memory is the processor's, as on a Jetson.
    """

    def __init__(self, bindings: Any, device: int) -> None:
        self._cuda = bindings
        self._context: int | None = None
        self._call("cuInit", 0)
        (count,) = self._call("cuDeviceGetCount")
        if device >= count:
            raise CudaError(f"there is no CUDA device {device}: the driver finds {count} of them.")
        (handle,) = self._call("cuDeviceGet", device)
        self._device = int(handle)
        (name,) = self._call("cuDeviceGetName", 256, self._device)
        self.name = name.split(b"\0")[0].decode(errors="replace")
        major, minor = (
            self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        self.compute_capability = 10 * major + minor
        self.multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        self.integrated = bool(self._attribute("INTEGRATED"))
        (total,) = self._call("cuDeviceTotalMem", self._device)
        self.total_memory = int(total)
        (context,) = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._context = int(context)
        self.make_current()

    @classmethod
    def open(cls, device: int = 0, bindings: Any = None) -> "Driver":
        """Open a device by its number.

        Args:
            bindings: the module `cuda.bindings.driver`, or what has its functions.

        Raises:
            CudaError: no `cuda-bindings`, no driver, no such device, or one that does not work.
        """
        try:
            return cls(_bindings() if bindings is None else bindings, device)
        except CudaError as error:
            if error.code:
                raise type(error)(f"no CUDA device can be used: {error}", error.code, error.name) from error
            raise
        except Exception as error:  # what the bindings raise where there is no libcuda differs by version
            raise CudaError(
                "there is no NVIDIA driver here. Where there is a GPU, install its driver; bundles for a GPU "
                "run on the machine that has one, those for the target 'cpu' everywhere."
            ) from error

    # Memory

    def free_memory(self) -> int:
        """Bytes that the device has free now, as the driver counts them."""
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def malloc(self, num_bytes: int) -> int:
        """Device memory, aligned to 256 bytes at least; its content is undefined.

        Raises:
            OutOfMemory: says how much was asked.
        """
        (pointer,) = self._call("cuMemAlloc", num_bytes, detail="{0} bytes")
        return int(pointer)

    def free(self, pointer: int) -> None:
        self._call("cuMemFree", pointer)

    def host_alloc(self, num_bytes: int) -> int:
        """Host memory that stays in place ("pinned"), which asynchronous copies need.

        Raises:
            OutOfMemory: says how much was asked.
        """
        (pointer,) = self._call("cuMemHostAlloc", num_bytes, 0, detail="{0} bytes")
        return int(pointer)

    def host_free(self, pointer: int) -> None:
        self._call("cuMemFreeHost", pointer)

    def to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy from host memory, which must stay as it is until the stream has come there."""
        self._call("cuMemcpyHtoDAsync", target, source, num_bytes, stream, detail="{2} bytes")

    def to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", target, source, num_bytes, stream, detail="{2} bytes")

    def on_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy within the device; the two ranges must not overlap."""
        self._call("cuMemcpyDtoDAsync", target, source, num_bytes, stream, detail="{2} bytes")

    def memset(self, pointer: int, byte: int, num_bytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", pointer, byte, num_bytes, stream, detail="{2} bytes")

    # Streams

    def create_stream(self) -> int:
        """A stream that does not wait for the legacy default stream, which others may use."""
        (stream,) = self._call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
        return int(stream)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """Wait for all that was put into the stream.

        Raises:
            CudaError: also of what ran in it. After one of a kernel (an illegal address, a failed launch) the
                context is lost: every later call of this process fails.
        """
        self._call("cuStreamSynchronize", stream)

    # Kernels

    def load_module(self, image: bytes) -> int:
        """Load a cubin for this device.

        Raises:
            CudaError: CUDA_ERROR_NO_BINARY_FOR_GPU or _INVALID_IMAGE where it is for another one, or damaged.
        """
        (module,) = self._call("cuModuleLoadData", image, detail=f"{len(image)} bytes")
        return int(module)

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: int, entry: str) -> int:
        (function,) = self._call("cuModuleGetFunction", module, entry.encode(), detail="{1!r}")
        return int(function)

    def allow_shared(self, function: int, num_bytes: int) -> None:
        """Let a function use so much dynamic shared memory; beyond 48 KiB it must be asked for."""
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, attribute, num_bytes, detail="{2} bytes shared")

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        stream: int,
        arguments: Sequence[int],
        types: Sequence[str],
    ) -> None:
        """Launch a kernel.

        Args:
            threads: of a block, in its first dimension.
            shared: bytes of dynamic shared memory.
            arguments: pointers and whole numbers, one for each of `types`.
            types: as Triton writes them: "*fp16" and such, "i32" or "i64".
        """
        count = len(arguments)
        if count != len(types):
            raise ValueError(f"{count} arguments are given for {len(types)} parameters.")
        for kind in types:
            if kind[0] != "*" and kind not in _INTEGERS:
                raise ValueError(f"{kind!r} is no type of an argument; expected a pointer, i32 or i64.")
        # Each argument has 8 bytes, of which the driver reads as many as the kernel says: the low ones come
        # first on every processor that has CUDA. It copies them before the call returns.
        slots = ctypes.c_uint64 * count
        values = slots(*arguments)
        start = ctypes.addressof(values)
        pointers = slots(*range(start, start + 8 * count, 8))
        self._call(
            "cuLaunchKernel", function, *grid, threads, 1, 1, shared, stream, ctypes.addressof(pointers), 0,
            detail="grid {1} × {2} × {3}, {4} threads, {7} bytes shared",
        )  # fmt: skip

    # Graphs

    def begin_capture(self, stream: int) -> None:
        """Record what this thread puts into the stream instead of running it.

        Calls of other threads that allocate memory, say, do not spoil it.
        """
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        """The recorded graph, ready to be launched any number of times.

        Raises:
            CudaError: something that cannot be recorded was called; the stream can be used again.
        """
        (graph,) = self._call("cuStreamEndCapture", stream)
        try:
            (executable,) = self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)
        return int(executable)

    def abandon_capture(self, stream: int) -> None:
        """End a capture whose graph is not wanted, spoilt or not; the stream can be used again."""
        try:
            (graph,) = self._call("cuStreamEndCapture", stream)
        except CudaError:
            return
        if int(graph):
            self._call("cuGraphDestroy", graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    # Context

    def make_current(self) -> None:
        """Let the calling thread use this device; a thread has one current context at a time."""
        if self._context is None:
            raise CudaError("the device was closed; open it again.")
        self._call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Give the context back; what was allocated in it must be freed before. Closing twice is fine."""
        if self._context is not None:
            self._context = None
            with suppress(CudaError):  # a kernel's error destroyed it already
                self._call("cuDevicePrimaryCtxRelease", self._device)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        (value,) = self._call("cuDeviceGetAttribute", attribute, self._device)
        return int(value)

    def _call(self, function: str, *arguments: Any, detail: str = "") -> tuple[Any, ...]:
        """What a function of the driver returns behind its result code; `detail` is for a message."""
        code, *values = getattr(self._cuda, function)(*arguments)
        if code != _SUCCESS:
            self._fail(function, code, detail.format(*arguments))
        return tuple(values)

    @staticmethod
    def _fail(function: str, code: Any, detail: str) -> NoReturn:
        kind = OutOfMemory if code == _OUT_OF_MEMORY else CudaError
        of = f" ({detail})" if detail else ""
        raise kind(f"{function}{of} failed with {code.name}.", int(code), code.name)


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError(
            f"the package cuda-bindings cannot be imported ({error}); GPU targets need it. "
            "Install `pagelet[gpu]`."
        ) from error
    return driver
