"""The engine of a bundle for the targets `rtx` and `tensorrt`: checked, loaded, and its contexts."""

import mmap
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, Protocol

from pagelet.models.errors import BackendError, BundleError, CapacityError
from pagelet.models.manifest import Manifest
from pagelet.models.targets import FIRST_FP8_SM, GpuSettings
from pagelet.plugins.cuda_driver import Driver
from pagelet.runtime.backends.device_memory import DeviceMemory, aligned, device_free_memory
from pagelet.runtime.backends.staging import Shape

DECODE, PREFILL = 0, 1  # the optimization profiles: few rows, fast; and as many as a step may have


class Attention(Protocol):
    """The attention nodes of one engine: where they come from, and what happens in them."""

    def hosting(self) -> AbstractContextManager[None]:
        """The block in which the engine is loaded."""

    def check(self) -> None:
        """Raise what a node failed with since the last check, if one did."""

    def close(self) -> None:
        """Unload the kernels; the engine is gone."""


# (the TensorRT module, the bundle's folder of kernels, the device)
LoadAttention = Callable[[Any, Path, Driver], Attention]


class AttentionPlugin:
    """The nodes as plugins that launch the bundle's kernels."""

    def __init__(self, trt: Any, kernels: Path, driver: Driver) -> None:
        from pagelet.plugins.kernels.library import KernelLibrary
        from pagelet.plugins.tensorrt.host import PluginHost
        from pagelet.plugins.tensorrt.plugin import attention_plugins

        self._plugins = attention_plugins(trt)
        self._library = KernelLibrary(kernels, driver)
        self._host = PluginHost(self._library)

    def hosting(self) -> AbstractContextManager[None]:
        return self._plugins.hosting(self._host)

    def check(self) -> None:
        self._host.check()

    def close(self) -> None:
        self._library.close()


def check_engine(folder: Path, manifest: Manifest, driver: Driver, version: str) -> GpuSettings:
    """Whether a bundle's engine is for this device and this TensorRT; the engine is not opened.

    Args:
        version: of the installed TensorRT, as `GpuSettings.engine_version` has it.

    Raises:
        BundleError: there is no engine, or it is for another device, version or precision.
    """
    settings, sm = manifest.gpu, driver.compute_capability
    rebuild = f"`pagelet build {folder} --rebuild` makes one that is."
    if settings is None or not settings.engine:
        raise BundleError(
            f"{folder} has no engine yet: one is built on the device. Run `pagelet build {folder}`."
        )
    device = f"{driver.name} (compute capability {sm // 10}.{sm % 10})"
    what = [
        name
        for name, kind in (("weights", manifest.quantization.weights), ("cache", manifest.cache_type))
        if kind == "fp8"
    ]
    if what and sm < FIRST_FP8_SM:
        raise BundleError(
            f"{folder} has {' and '.join(what)} in FP8, which needs compute capability 8.9; this device is "
            f"{device}. Export the model with other types."
        )
    if sm not in settings.engine_sms:
        known = ", ".join(f"{known // 10}.{known % 10}" for known in settings.engine_sms)
        raise BundleError(
            f"the engine of {folder} is for compute capability {known}, not for this device, {device}: "
            f"{rebuild}"
        )
    # By default "compatible only with the version of TensorRT used to build them" (TensorRT, "Version
    # Compatibility"); TensorRT-RTX, too, has VERSION_MISMATCH among what makes an engine invalid.
    if settings.engine_version != version:
        raise BundleError(
            f"the engine of {folder} is for {settings.engine_version}, not for what is installed, {version}: "
            f"{rebuild}"
        )
    if not (folder / settings.engine).is_file():
        raise BundleError(f"{folder / settings.engine} is missing: {rebuild}")
    return settings


class Engine:
    """A deserialized engine and the memory that its contexts share.

    Attributes:
        inputs, outputs: the names of its tensors.
        bounds: for each profile, the largest shape of each input.
        workspace_bytes: of the memory that contexts compute in, one at a time.
    """

    def __init__(self, path: Path, trt: Any, memory: DeviceMemory, attention: Attention) -> None:
        """Load an engine, after `check_engine`.

        Raises:
            BackendError: TensorRT, or the attention plugin, refuses it.
            CapacityError: the device has no room.
        """
        size, free = path.stat().st_size, device_free_memory(memory.driver)
        if size > free:
            raise CapacityError(
                f"the engine {path} has {size} bytes, but only {free} bytes of the memory of "
                f"{memory.driver.name} are free. Close what else uses the device, or export a smaller model."
            )
        self._trt, self._memory, self._attention = trt, memory, attention
        self._log: deque[str] = deque(maxlen=3)
        self._logger = _logger(trt, self._log)
        self._engine: Any = None
        self._compiled: Any = None  # TensorRT-RTX's kernels, which all contexts use
        self._runtime: Any = trt.Runtime(self._logger)
        try:
            self._load(path)
        except BaseException:
            self.close()
            raise

    def _load(self, path: Path) -> None:
        with (
            self._attention.hosting(),
            path.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as plan,
        ):
            self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            self.fail(f"the engine {path} cannot be loaded")
        self.inputs, self.outputs = self._names()
        self.bounds = [
            {name: tuple(self._engine.get_tensor_profile_shape(name, profile)[2]) for name in self.inputs}
            for profile in range(self._engine.num_optimization_profiles)
        ]
        self.workspace_bytes = aligned(self._engine.device_memory_size_v2)
        self._workspace = self._memory.malloc(
            self.workspace_bytes, "the engine", "Lower kv_memory, or export with a smaller step_tokens."
        )

    def row_shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions but for the first."""
        return tuple(self._engine.get_tensor_shape(name))[1:]

    def _names(self) -> tuple[set[str], set[str]]:
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = {name for name in names if self._is_input(name)}
        return inputs, {*names} - inputs

    def _is_input(self, name: str) -> bool:
        return bool(self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT)

    def _strategy(self, for_graph: bool) -> Any:
        """What a context is created with: a strategy, or in TensorRT-RTX a config that holds it."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(self._trt, "DynamicShapesKernelSpecializationStrategy"):
            return strategy
        # TensorRT-RTX compiles kernels for the shapes that it meets. A graph would keep those that it uses
        # meanwhile for ever, so where one is captured it has to wait for them.
        kinds = self._trt.DynamicShapesKernelSpecializationStrategy
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if for_graph else kinds.LAZY
        if self._compiled is None:
            self._compiled = config.create_runtime_cache()
        config.set_runtime_cache(self._compiled)
        return config

    def create_context(self, profile: int, *, for_graph: bool = False) -> Any:
        """An execution context for one profile.

        All contexts share the workspace, so one runs at a time, in the backend's stream.

        Raises:
            BackendError: TensorRT refuses.
        """
        context = self._engine.create_execution_context(self._strategy(for_graph))
        if context is None:
            self.fail("a context of the engine cannot be created")
        context.set_device_memory(self._workspace, self.workspace_bytes)
        if not context.set_optimization_profile_async(profile, self._memory.stream):
            self.fail(f"the engine's profile {profile} cannot be used")
        return context

    def set_address(self, context: Any, name: str, address: int) -> None:
        if not context.set_tensor_address(name, address):
            self.fail(f"the engine does not take the address of {name}")

    def set_input(self, context: Any, name: str, shape: Shape, address: int) -> None:
        if not context.set_input_shape(name, shape):
            self.fail(f"the engine does not take {name} of shape {list(shape)}")
        self.set_address(context, name, address)

    def enqueue(self, context: Any) -> None:
        """Put a step into the stream.

        Raises:
            BackendError: with what TensorRT or a plugin says.
        """
        if not context.execute_async_v3(self._memory.stream):
            self.fail("a step failed")

    def can_be_captured(self, context: Any) -> bool:
        """Whether its steps may become CUDA graphs; only TensorRT-RTX knows beforehand."""
        ask = getattr(context, "is_stream_capturable", None)
        return ask is None or bool(ask(self._memory.stream))

    def fail(self, what: str) -> NoReturn:
        """Raise a BackendError with what TensorRT and the plugin say about it."""
        said = " ".join(self._log) or "TensorRT does not say why."
        self._log.clear()
        try:
            self._attention.check()
        except Exception as error:
            raise BackendError(f"{what}: {error}") from error
        raise BackendError(f"{what}: {said}")

    def close(self) -> None:
        """Destroy the engine; its contexts must be gone. Closing twice is fine."""
        self._compiled = self._engine = self._runtime = None


def _logger(trt: Any, errors: deque[str]) -> Any:
    """An ILogger that keeps the last errors for messages and is silent otherwise."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # pybind11 wants it called by its own name

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                errors.append(message.strip())

    return Logger()
