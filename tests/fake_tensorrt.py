"""TensorRT without a device: engines whose steps ONNX Runtime computes, on the addresses that were bound.

An engine's file names a bundle for the CPU. Its graph has the inputs and outputs of an engine, so a backend
over this package and a `FakeCuda` must give what the CPU's backend gives, to the bit. Contexts insist on what
TensorRT asks for, and forget nothing: an address of freed memory, a shape out of its profile, a captured
context that is changed, a workspace that is too small are errors.
"""

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_cuda import FakeCuda
from numpy.typing import NDArray

from pagelet.models.engine_profiles import engine_profiles
from pagelet.models.manifest import Manifest, load_manifest
from pagelet.models.targets import GpuSettings
from pagelet.plugins.session import open_session

ENGINE = "model.engine"
VERSION = "1.7.1.116"
WORKSPACE = 5000  # bytes
_CACHE_TYPES = {"f32": (np.float32, 1), "f16": (np.float16, 10), "int8": (np.int8, 3), "fp8": (np.uint8, 17)}
_INT64 = ("input_ids", "position_ids", "logits_indices")


def as_gpu_bundle(
    bundle: Path, folder: Path, *, target: str = "rtx", **settings: Any
) -> tuple[Path, Manifest]:
    """A bundle for the CPU as one for a GPU: its engine in `folder`, and its manifest, which is not saved."""
    name = {"rtx": "TensorRT-RTX", "tensorrt": "TensorRT"}[target]
    gpu = GpuSettings(
        **{
            "sms": (89,),
            "engine": ENGINE,
            "engine_version": f"{name} {VERSION}",
            "engine_sms": (89,),
            "kernels": "kernels",
            "max_sequences": 8,
            "decode_tokens": 80,
            "step_tokens": 256,
            "logits_rows": 160,
        }
        | settings
    )
    folder.mkdir(parents=True, exist_ok=True)
    manifest = replace(load_manifest(bundle), target=target, gpu=gpu)
    plan = {
        "bundle": str(bundle),
        "sizes": [gpu.max_sequences, gpu.decode_tokens, gpu.step_tokens, gpu.logits_rows],
    }
    (folder / ENGINE).write_text(json.dumps(plan))
    return folder, manifest


@dataclass
class FakeAttention:
    """Stands for the plugin and its kernels.

    Attributes:
        error: what a node failed with.
        open: for how many engines kernels are loaded.
    """

    error: Exception | None = None
    open: int = 0

    def load(self, trt: Any, kernels: Path, driver: Any) -> "FakeAttention":
        assert kernels.name == "kernels"
        self.open += 1
        return self

    @contextmanager
    def hosting(self) -> Iterator[None]:
        yield

    def check(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self.open -= 1


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class FakeTensorRT:
    """Pass it as `trt`.

    Args:
        rtx: as TensorRT-RTX has it: runtime configs, kernels for the shapes that are met.

    Attributes:
        failures: what the next calls of a method fail with, by its name; they log the text, return what
            TensorRT returns then.
        capturable: what TensorRT-RTX says of its contexts.
    """

    ILogger = ILogger
    TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
    ExecutionContextAllocationStrategy = SimpleNamespace(STATIC="static", USER_MANAGED="user managed")

    def __init__(self, cuda: FakeCuda, *, rtx: bool = True, version: str = VERSION) -> None:
        self.__version__ = version
        self.cuda = cuda
        self.failures: dict[str, str] = {}
        self.capturable = True
        self.num_deserialized = 0
        self.contexts: list[Any] = []  # weak references, in the order of their creation
        self._engines: weakref.WeakSet[FakeEngine] = weakref.WeakSet()
        if rtx:
            self.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(LAZY="lazy", EAGER="eager")

    def Runtime(self, logger: Any) -> "FakeRuntime":
        return FakeRuntime(self, logger)

    def fails(self, method: str, logger: Any) -> bool:
        if (message := self.failures.pop(method, None)) is None:
            return False
        logger.log(ILogger.INFO, "of no interest")
        logger.log(ILogger.ERROR, message)
        return True

    def assert_nothing_is_left(self) -> None:
        gc.collect()
        assert not self._engines
        assert not [context for context in self.contexts if context() is not None]


@dataclass(eq=False)
class FakeRuntime:
    trt: FakeTensorRT
    logger: Any

    def deserialize_cuda_engine(self, plan: Any) -> "FakeEngine | None":
        self.trt.num_deserialized += 1
        if self.trt.fails("deserialize_cuda_engine", self.logger):
            return None
        engine = FakeEngine(self.trt, self.logger, json.loads(bytes(plan)))
        self.trt._engines.add(engine)
        return engine


class FakeEngine:
    """What `pagelet.runtime.backends` calls, with the signatures of TensorRT 10.3 and TensorRT-RTX 1.7."""

    num_optimization_profiles = 2
    device_memory_size_v2 = WORKSPACE

    def __init__(self, trt: FakeTensorRT, logger: Any, plan: dict[str, Any]) -> None:
        self.trt, self.logger = trt, logger
        bundle = Path(plan["bundle"])
        manifest = load_manifest(bundle)
        sequences, decode_tokens, step_tokens, logits_rows = plan["sizes"]
        gpu = GpuSettings(
            max_sequences=sequences,
            decode_tokens=decode_tokens,
            step_tokens=step_tokens,
            logits_rows=logits_rows,
        )
        self.profiles = engine_profiles(manifest.spec, manifest.cache_type, manifest.block_size, gpu)
        self.session = open_session(bundle / manifest.graph, threads=1)
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.names = [*self.inputs, *(value.name for value in self.session.get_outputs())]
        self.cache_type = manifest.cache_type
        self.vocab_size = manifest.spec.vocab_size
        self.num_io_tensors = len(self.names)
        if not hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
            self.create_runtime_config = None

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self.inputs else "output"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name == "logits":
            return -1, self.vocab_size
        return (-1, *self.profiles[0][name][0][1:])

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return list(self.profiles[profile][name])

    def create_runtime_config(self) -> Any:  # type: ignore[no-redef]
        return FakeRuntimeConfig()

    def create_execution_context(self, config: Any) -> "FakeContext | None":
        if self.trt.fails("create_execution_context", self.logger):
            return None
        is_rtx = hasattr(self.trt, "DynamicShapesKernelSpecializationStrategy")
        assert (config.strategy if is_rtx else config) == "user managed"
        context = FakeContext(self, config if is_rtx else None)
        self.trt.contexts.append(weakref.ref(context))
        return context


class FakeRuntimeConfig:
    """What TensorRT-RTX alone has. A runtime cache holds the kernels that were compiled."""

    strategy = "static"
    dynamic_shapes_kernel_specialization_strategy = "lazy"
    cache: object = None

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: object) -> bool:
        self.cache = cache
        return True


@dataclass(eq=False)
class FakeContext:
    """
    Attributes:
        config: of TensorRT-RTX.
        changes: how often something of it was set.
        captured: it belongs to a graph, and must stay as it is.
    """

    engine: FakeEngine
    config: "FakeRuntimeConfig | None"
    profile: int = -1
    workspace: tuple[int, int] = (0, 0)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    captured: bool = False
    runs: int = 0
    changes: int = 0

    def set_device_memory(self, memory: int, size: int) -> None:
        self._change()
        assert memory % 256 == 0
        assert size >= WORKSPACE
        self.workspace = memory, size

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._change()
        assert stream_handle in self.engine.trt.cuda.streams
        self.profile = profile_index
        return not self._fails("set_optimization_profile_async")

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._change()
        assert name in self.engine.inputs
        least, _, most = self.engine.profiles[self.profile][name]
        fits = len(shape) == len(most) and all(
            a <= b <= c for a, b, c in zip(least, shape, most, strict=True)
        )
        if not fits:
            self.engine.logger.log(ILogger.ERROR, f"{name} {shape} is not in profile {self.profile}")
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._change()
        assert name in self.engine.names
        if self._fails("set_tensor_address"):
            return False
        self.addresses[name] = memory
        return memory > 0 and memory % 256 == 0

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.trt.capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self._fails("execute_async_v3"):
            return False
        assert set(self.shapes) == set(self.engine.inputs)
        assert set(self.addresses) == set(self.engine.names)
        cuda = self.engine.trt.cuda
        cuda.calls.append(("execute_async_v3", (self.profile,)))
        if cuda.streams[stream_handle].captured is not None:
            assert self.runs, "a context was captured before it ran"
            self.captured = True
        self.runs += 1
        step = _Step(self.engine, dict(self.shapes), dict(self.addresses), self.workspace)
        cuda.enqueue(stream_handle, step.run)
        return True

    def _change(self) -> None:
        assert not self.captured, "a captured context was changed"
        self.changes += 1

    def _fails(self, method: str) -> bool:
        return self.engine.trt.fails(method, self.engine.logger)


@dataclass
class _Step:
    """One execution, with what was set when it was put into the stream."""

    engine: FakeEngine
    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    workspace: tuple[int, int]

    def run(self) -> None:
        from onnxruntime import OrtValue

        cuda = self.engine.trt.cuda
        cuda.array(self.workspace[0], (self.workspace[1],), np.uint8)[:] = 0xEE
        binding = self.engine.session.io_binding()
        small = {}
        for name, shape in self.shapes.items():
            if "_cache." not in name:
                small[name] = cuda.array(
                    self.addresses[name], shape, np.int64 if name in _INT64 else np.int32
                )
                continue
            out_name = name.replace("_cache.", "_cache_out.")
            assert self.addresses[name] == self.addresses[out_name], "a cache is not written in place"
            dtype, element = (np.float32, 1) if "_scale_" in name else _CACHE_TYPES[self.engine.cache_type]
            array = cuda.array(self.addresses[name], shape, dtype)
            value = OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(out_name, value)
        small, rows = _without_padding(small)
        for name, array in small.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        computed = np.empty((len(rows), self.engine.vocab_size), np.float32)
        binding.bind_ortvalue_output("logits", OrtValue.ortvalue_from_numpy(computed))
        self.engine.session.run_with_iobinding(binding)
        shape = *self.shapes["logits_indices"], self.engine.vocab_size
        logits = cuda.array(self.addresses["logits"], shape, np.float32)
        logits[:] = np.nan  # what padded rows have is nobody's
        logits[rows] = computed


def _without_padding(small: dict[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], NDArray[np.intp]]:
    """The inputs without padded sequences, and the rows of logits that are left."""
    tables = [array for name, array in small.items() if name.startswith("block_table")]
    padded = (small["past_seqlens"] == 0) & np.all([(table < 0).all(axis=1) for table in tables], axis=0)
    everything = np.arange(len(small["logits_indices"]))
    if not padded.any():
        return small, everything
    offsets = small["cumulative_sequence_length"]
    counts = np.diff(offsets)
    assert (counts[padded] == 1).all()
    kept_rows = np.repeat(~padded, counts)
    assert not small["input_ids"][~kept_rows].any()
    assert not small["position_ids"][~kept_rows].any()
    rows = everything[kept_rows[small["logits_indices"]]]
    new_row = np.cumsum(kept_rows) - 1
    return {
        "input_ids": small["input_ids"][kept_rows],
        "position_ids": small["position_ids"][kept_rows],
        "cumulative_sequence_length": np.concatenate([[0], np.cumsum(counts[~padded])]).astype(np.int32),
        "past_seqlens": small["past_seqlens"][~padded],
        "ancestor_mask": small["ancestor_mask"],
        "logits_indices": new_row[small["logits_indices"][rows]],
        **{name: array[~padded] for name, array in small.items() if name.startswith("block_table")},
    }, rows
