"""KernelLibrary: compiled kernels of a bundle on one GPU. Needs a driver, neither Triton nor a toolkit."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagelet.plugins.cuda_driver import CudaError, Driver
from pagelet.plugins.kernels.launch_plan import Argument, Offset, Shapes, Workspace, plan
from pagelet.plugins.kernels.records import KernelError, KernelRecord, KernelTable
from pagelet.plugins.kernels.variant import AttentionVariant, KernelSpec

_WARP = 32  # threads
_STATIC_SHARED = 48 << 10  # bytes: more must be asked for
_ALIGNMENT = 16  # bytes, of every pointer: what the kernels were compiled to expect
_NULL_POINTERS = (0, 0)  # Triton's scratch memory, of which our kernels have none
_NULL_TYPES = ("*i8", "*i8")
_MOST_RESOLVED = 4096  # that are kept: layers times the shapes of their steps


class KernelLibraryError(KernelError):
    """A kernel cannot be run: it is not there, damaged, for another GPU, or given a wrong pointer."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A kernel that is loaded."""

    handle: int
    threads: int
    shared: int
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch, but for the stream."""

    function: _Function
    grid: tuple[int, int, int]
    arguments: tuple[int, ...]


class KernelLibrary:
    """The kernels in a folder, for the driver's device. Modules are loaded when they are first used.

    Args:
        folder: with `kernels.json`.

    Raises:
        KernelTableError: the table is missing or damaged.
        KernelLibraryError: the kernels are not for this GPU.
    """

    def __init__(self, folder: Path, driver: Driver) -> None:
        self._folder, self._driver = folder, driver
        self._table = KernelTable.read(folder)
        self._sm = driver.compute_capability
        sms = {sm for record in self._table.kernels.values() for sm in record.cubins}
        if self._sm not in sms:
            raise KernelLibraryError(
                f"the kernels in {folder} are for SM {', '.join(map(str, sorted(sms)))}; {driver.name} has "
                f"SM {self._sm}: export with --sm {self._sm}"
            )
        self._lock = threading.Lock()
        self._closed = False
        self._modules: list[int] = []
        self._functions: dict[str, _Function] = {}
        # TensorRT gives a layer the same memory at every step of the same shapes.
        self._resolved: dict[Hashable, tuple[_Launch, ...]] = {}

    def run(
        self,
        variant: AttentionVariant,
        shapes: Shapes,
        tensors: Mapping[str, int],
        workspace: int,
        stream: int,
    ) -> None:
        """Puts the launches of a node's step into a stream.

        Args:
            tensors: device pointers by name; those that the node lacks are left out.
            workspace: of `workspace_bytes` bytes.

        Raises:
            KernelLibraryError: a kernel is missing, damaged or does not load, or a pointer is not aligned.
            CudaError: a launch failed.
        """
        key = (variant, shapes, workspace, *tensors.items())
        launch = self._driver.launch
        for each in self._resolved.get(key) or self._resolve(key, variant, shapes, tensors, workspace):
            function = each.function
            launch(
                function.handle,
                each.grid,
                function.threads,
                function.shared,
                stream,
                each.arguments,
                function.types,
            )

    def load(self, variant: AttentionVariant) -> None:
        """Loads all kernels of a variant, so that no step has to, and a CUDA graph can be captured.

        Raises:
            KernelLibraryError: one is missing, damaged or does not load.
        """
        for spec in variant.kernels():
            self._function(spec)

    def close(self) -> None:
        """Unloads the modules; nothing of them may be running, and nothing runs any more. Twice is fine."""
        with self._lock:
            self._closed = True
            modules, self._modules = self._modules, []
            self._functions.clear()
            self._resolved.clear()
        for module in modules:
            with suppress(CudaError):  # after a kernel's error they are gone with the context
                self._driver.unload_module(module)

    def _resolve(
        self,
        key: Hashable,
        variant: AttentionVariant,
        shapes: Shapes,
        tensors: Mapping[str, int],
        workspace: int,
    ) -> tuple[_Launch, ...]:
        if any(pointer % _ALIGNMENT for pointer in (workspace, *tensors.values())):
            raise KernelLibraryError(_misaligned({**tensors, "workspace": workspace}))

        def value(argument: Argument) -> int:
            if isinstance(argument, int):
                return argument
            if isinstance(argument, Workspace):
                return workspace + argument.offset
            name, offset = (argument.name, argument.bytes) if isinstance(argument, Offset) else (argument, 0)
            return tensors[name] + offset if name in tensors else 0

        resolved = tuple(
            _Launch(
                self._function(launch.kernel), launch.grid, (*map(value, launch.arguments), *_NULL_POINTERS)
            )
            for launch in plan(variant, shapes)
        )
        if len(self._resolved) >= _MOST_RESOLVED:
            self._resolved.clear()
        self._resolved[key] = resolved
        return resolved

    def _function(self, spec: KernelSpec) -> _Function:
        with self._lock:
            if (function := self._functions.get(spec.key)) is None:
                function = self._functions[spec.key] = self._load(spec)
            return function

    def _load(self, spec: KernelSpec) -> _Function:
        if self._closed:
            raise KernelLibraryError("the kernels were unloaded: open the bundle again")
        record = self._table.kernels.get(spec.key)
        if record is None or self._sm not in record.cubins:
            raise KernelLibraryError(
                f"the kernel {spec.key} for SM {self._sm} is not in {self._folder}: export again, with the "
                "version of pagelet that runs the bundle"
            )
        if record.arguments != spec.arguments or record.warps != spec.warps:
            raise KernelLibraryError(
                f"the kernel {spec.key} in {self._folder} takes other arguments: export again"
            )
        cubin = record.cubins[self._sm]
        image = self._image(record)
        try:
            module = self._driver.load_module(image)
            self._modules.append(module)
            handle = self._driver.function(module, record.entry)
            if cubin.shared > _STATIC_SHARED:
                self._driver.allow_shared(handle, cubin.shared)
        except CudaError as error:
            raise KernelLibraryError(
                f"the kernel {spec.key} for SM {self._sm}, made by {self._table.toolchains.get(self._sm)}, "
                f"does not load on {self._driver.name}: {error} A driver of a later CUDA may be needed"
            ) from error
        types = (*(kind for _, kind in record.arguments), *_NULL_TYPES)
        return _Function(handle, record.warps * _WARP, cubin.shared, types)

    def _image(self, record: KernelRecord) -> bytes:
        path, cubin = self._folder / record.file(self._sm), record.cubins[self._sm]
        try:
            found = path.stat().st_size
            image = path.read_bytes() if found == cubin.bytes else b""
        except OSError as error:
            raise KernelLibraryError(f"the kernel {path} cannot be read ({error}): export again") from error
        if found != cubin.bytes or hashlib.sha256(image).hexdigest() != cubin.sha256:
            raise KernelLibraryError(f"the kernel {path} is damaged, its hash is another: export again")
        return image


def _misaligned(pointers: Mapping[str, int]) -> str:
    names = [name for name, pointer in pointers.items() if pointer % _ALIGNMENT]
    return f"attention was given tensors that are not aligned to {_ALIGNMENT} bytes: {', '.join(names)}"
