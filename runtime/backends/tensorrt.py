"""The backend of the targets `rtx` and `tensorrt`: a TensorRT engine over a cache in the device's memory.

A step is one copy to the device, one launch, one copy of the logits back, and one wait for them, all in one
stream. Steps that decode are launched as CUDA graphs (`cuda_graphs`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from pagelet.models.errors import BackendError, BundleError, CapacityError, PageletError
from pagelet.models.manifest import Manifest
from pagelet.plugins.cuda_driver import CudaError, Driver, OutOfMemory
from pagelet.runtime.backends.base import ByteArray, Float32Array, StepBatch
from pagelet.runtime.backends.cuda_graphs import DecodeGraphs, Step, bucket, is_decode, table_width
from pagelet.runtime.backends.device_cache import DeviceCache
from pagelet.runtime.backends.device_memory import DeviceMemory
from pagelet.runtime.backends.staging import NO_TREES, InputStaging, Shape, staged_bytes, step_shapes
from pagelet.runtime.backends.tensorrt_engine import (
    DECODE,
    PREFILL,
    AttentionPlugin,
    Engine,
    LoadAttention,
    check_engine,
)
from pagelet.runtime.cache_layout import CacheLayout

# By how much a logit may differ with what else is in the step, by the type of the activations. Kernels for
# other numbers of rows sum in another order. Taken to be three roundings (2^-11 or 2^-8, relative) of logits
# of magnitude 30; not measured. FP8 turns the same difference into steps eight times as wide as f16's.
_ROW_NOISE = {"f16": 0.05, "bf16": 0.4}
_FP8_ROW_NOISE = 0.4


class TensorRTBackend:
    """An engine, the contexts that run it, and all memory of the device that they need."""

    supports_trees = True

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        layout: CacheLayout,
        *,
        max_rows: int,
        driver: Driver | None = None,
        trt: Any = None,
        load_attention: LoadAttention = AttentionPlugin,
    ) -> None:
        """Load a bundle's engine.

        Args:
            max_rows: the most rows of logits that one step asks for.
            driver: of the device, which belongs to the backend from here on; None: the first device.
            trt: the TensorRT module; None: the one of the bundle's target.

        Raises:
            BackendError: there is no device or no TensorRT, or it refuses the engine.
            BundleError: the bundle has no engine, or one for another device or version, or of another kind.
            CapacityError: the device's memory is too small, or a step may be larger than the engine takes.
        """
        self.layout = layout
        self.vocab_size = manifest.spec.vocab_size
        self.cache_type = manifest.cache_type
        self._max_rows = max_rows
        with _opening(folder), ExitStack() as resources:
            driver = driver or Driver.open()
            resources.callback(driver.close)
            driver.make_current()
            self._open(folder, manifest, trt, driver, load_attention, resources)
            self._resources = resources.pop_all()

    def _open(
        self,
        folder: Path,
        manifest: Manifest,
        trt: Any,
        driver: Driver,
        load_attention: LoadAttention,
        resources: ExitStack,
    ) -> None:
        """What the constructor does; `resources` gets what frees, in the order in which it must not be."""
        from pagelet.plugins.tensorrt.build import PACKAGES, engine_version
        from pagelet.plugins.tensorrt.runtime_library import import_tensorrt

        trt = trt or import_tensorrt(PACKAGES[manifest.target], parser=False)
        version = engine_version(manifest.target, trt)
        settings = check_engine(folder, manifest, driver, version)
        self.row_noise = _row_noise(manifest, settings.activations)
        self.fingerprint = (
            f"{manifest.fingerprint} {manifest.cache_type} {manifest.block_size} {manifest.target} "
            f"sm{driver.compute_capability} {version}"
        )
        self._driver = driver
        memory = self._memory = DeviceMemory(driver)
        resources.callback(memory.free)
        attention = load_attention(trt, folder / settings.kernels, driver)
        resources.callback(attention.close)
        engine = self._engine = Engine(folder / settings.engine, trt, memory, attention)
        resources.callback(engine.close)
        self._cache = DeviceCache(manifest.spec, manifest.cache_type, self.layout, memory)
        self._check_engine()
        self._max_width = min(bounds["block_table_0"][1] for bounds in engine.bounds)
        self.max_context = min(manifest.spec.max_context, self._max_width * self.layout.block_size)
        self._allocate()
        self._contexts: dict[int, Any] = {}
        self._plain_steps: dict[int, Step] = {}
        resources.callback(self._contexts.clear)
        resources.callback(self._plain_steps.clear)
        for profile in (DECODE, PREFILL):
            self._contexts[profile] = self._create_context(profile)
        self._graphs = DecodeGraphs(engine, memory, self._create_step)
        resources.callback(self._graphs.close)
        driver.synchronize(memory.stream)

    def _check_engine(self) -> None:
        """The engine's inputs and outputs are the contract's, and the largest step and the cache fit."""
        arrays, bounds = self._cache.arrays, self._engine.bounds
        small = self._shapes(1, 1, 1, 1)
        for what, found, expected in (
            ("inputs", self._engine.inputs, {*small} | {array.name for array in arrays}),
            ("outputs", self._engine.outputs, {"logits"} | {array.out_name for array in arrays}),
        ):
            if found != expected:
                raise BundleError(
                    f"the engine's {what} are not those of the contract: missing {sorted(expected - found)}, "
                    f"unexpected {sorted(found - expected)}. Export the bundle again."
                )
        shapes = {array.name: array.shape[1:] for array in arrays} | {"logits": (self.vocab_size,)}
        for name, shape in shapes.items():
            if (row := self._engine.row_shape(name)) != shape:
                raise BundleError(
                    f"the engine's {name} has rows of shape {list(row)}, the manifest asks for "
                    f"{list(shape)}. Export the bundle again."
                )
        if len(bounds) != 2:
            raise BundleError(f"the engine has {len(bounds)} profiles; expected 2. Export the bundle again.")
        for what, wanted, name, remedy in (
            ("max_step_tokens is", self.layout.max_step_tokens, "input_ids", "step_tokens"),
            ("most rows of logits in a step are", self._max_rows, "logits_indices", "logits_rows"),
        ):
            if wanted > (built := bounds[PREFILL][name][0]):
                raise CapacityError(
                    f"the {what} {wanted}, but the engine was built for {built}. Lower max_step_tokens or "
                    f"max_sequences, or export with a larger {remedy}."
                )
        for array in arrays:
            if array.shape[0] > (built := min(profile[array.name][0] for profile in bounds)):
                raise CapacityError(
                    f"the KV cache has {array.shape[0]} blocks, but the engine was built for {built}. "
                    "Lower kv_memory."
                )

    def _allocate(self) -> None:
        memory, bounds = self._memory, self._engine.bounds
        small = self._shapes(1, 1, 1, 1)
        most = max(staged_bytes({name: profile[name] for name in small}) for profile in bounds)
        self._staging = InputStaging(memory, most)
        # Padded sequences have logits too, which are not copied back.
        self._max_sequences = bounds[DECODE]["past_seqlens"][0]
        row_bytes = 4 * self.vocab_size
        purpose, remedy = "the logits of a step", "Lower max_sequences or kv_memory."
        rows = max(self._max_rows, self._max_sequences)
        self._device_logits = memory.malloc(rows * row_bytes, purpose, remedy)
        pinned = memory.pinned(self._max_rows * row_bytes, purpose, remedy)
        self._host_logits = pinned.ctypes.data
        self._logits: Float32Array = pinned.view(np.float32).reshape(self._max_rows, self.vocab_size)

    def _create_context(self, profile: int, *, for_graph: bool = False) -> Any:
        """A context with the caches and the logits bound."""
        engine, cache = self._engine, self._cache
        outputs = {array.out_name: cache.address(array) for array in cache.arrays}
        context = engine.create_context(profile, for_graph=for_graph)
        for name, address in (outputs | {"logits": self._device_logits}).items():
            engine.set_address(context, name, address)
        for array in cache.arrays:
            engine.set_input(context, array.name, array.shape, cache.address(array))
        return context

    def run(self, batch: StepBatch) -> Float32Array:
        rows = len(batch.logits_indices)
        if rows > self._max_rows:
            raise BackendError(
                f"a step asks for {rows} rows of logits; the backend was opened for {self._max_rows}. "
                "Open it with a larger max_rows."
            )
        with self._working("a step failed"):
            width = table_width(batch, self.layout.block_size, self._max_width)
            decode = self._decode_step(batch, width)
            step = decode or self._plain_step(batch, width)
            step.inputs.fill(batch)
            self._staging.send(step.inputs)
            self._graphs.launch(step)
            num_bytes = 4 * rows * self.vocab_size
            self._driver.to_host(self._host_logits, self._device_logits, num_bytes, self._memory.stream)
            self._driver.synchronize(self._memory.stream)
            if decode is not None:
                self._graphs.capture(decode)
        return self._logits[:rows]

    def _decode_step(self, batch: StepBatch, width: int) -> Step | None:
        """A step that can be a graph, with room for the batch; None for other batches."""
        sequences = len(batch.past_seqlens)
        if not is_decode(batch) or sequences > self._max_sequences:
            return None
        return self._graphs.step(bucket(sequences, self._max_sequences), width)

    def _create_step(self, sequences: int, width: int) -> Step:
        inputs = self._staging.place(self._shapes(sequences, sequences, sequences, width))
        step = Step(self._create_context(DECODE, for_graph=True), inputs)
        self._bind(step)
        return step

    def _plain_step(self, batch: StepBatch, width: int) -> Step:
        """A step of the batch's own shapes, in the first profile that they fit into.

        Of each profile the last one is kept: for shapes that it has seen just now TensorRT prepares nothing.
        """
        mask = NO_TREES if batch.ancestor_mask is None else batch.ancestor_mask.shape
        shapes = self._shapes(
            len(batch.input_ids), len(batch.past_seqlens), len(batch.logits_indices), width, mask
        )
        too_large = ""
        for profile, bounds in enumerate(self._engine.bounds):
            if too_large := _too_large(shapes, bounds):
                continue
            step = self._plain_steps.pop(profile, None)
            if step is None or step.inputs.shapes != shapes:
                step = Step(self._contexts[profile], self._staging.place(shapes))
                self._bind(step)
            self._plain_steps[profile] = step
            return step
        raise BackendError(f"{too_large}. The engine was opened for smaller steps: this is a bug in pagelet.")

    def _shapes(
        self, tokens: int, sequences: int, logits: int, width: int, mask: Shape = NO_TREES
    ) -> dict[str, Shape]:
        return step_shapes(
            tokens=tokens,
            sequences=sequences,
            logits=logits,
            table_width=width,
            groups=len(self.layout.groups),
            mask=mask,
        )

    def _bind(self, step: Step) -> None:
        for name, shape in step.inputs.shapes.items():
            self._engine.set_input(step.context, name, shape, step.inputs.addresses[name])

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        with self._working("blocks of the KV cache cannot be copied"):
            self._cache.copy_blocks(group, pairs)

    def copy_slots(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        with self._working("tokens in the KV cache cannot be moved"):
            self._cache.copy_slots(group, pairs)

    def read_blocks(self, group: int, blocks: Sequence[int]) -> ByteArray:
        with self._working("blocks of the KV cache cannot be read"):
            return self._cache.read_blocks(group, blocks)

    def write_blocks(self, group: int, blocks: Sequence[int], rows: Sequence[ByteArray]) -> None:
        with self._working("blocks of the KV cache cannot be written"):
            self._cache.write_blocks(group, blocks, rows)

    @contextmanager
    def _working(self, failure: str) -> Iterator[None]:
        """With the device for this thread; errors become BackendErrors, after which the stream is empty."""
        try:
            self._driver.make_current()
            yield
        except BaseException as error:
            with suppress(CudaError):  # what is staged must not be overwritten while it may still be read
                self._driver.synchronize(self._memory.stream)
            if isinstance(error, PageletError) or not isinstance(error, Exception):
                raise
            raise BackendError(f"{failure}: {error}") from error

    def close(self) -> None:
        with suppress(CudaError):  # the device may have failed, or be closed already
            self._driver.make_current()
        self._resources.close()


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Errors of the device, of TensorRT and of the plugin become ours."""
    try:
        yield
    except PageletError:
        raise
    except OutOfMemory as error:
        raise CapacityError(
            f"{folder} cannot be opened: {error} Lower kv_memory, or close what else uses the device."
        ) from error
    except Exception as error:
        raise BackendError(f"{folder} cannot be opened: {error}") from error


def _row_noise(manifest: Manifest, activations: str) -> float:
    noise = _ROW_NOISE[activations]
    is_fp8 = "fp8" in (manifest.quantization.weights, manifest.cache_type)
    return max(noise, _FP8_ROW_NOISE) if is_fp8 else noise


def _too_large(shapes: Mapping[str, Shape], bounds: Mapping[str, Shape]) -> str:
    """Which input is too large for a profile; "" where all fit."""
    for name, shape in shapes.items():
        if any(size > most for size, most in zip(shape, bounds[name], strict=True)):
            return f"a step has {name} of shape {list(shape)}; the engine takes at most {list(bounds[name])}"
    return ""
