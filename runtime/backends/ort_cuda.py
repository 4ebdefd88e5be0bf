"""The backend of target `cuda`: ONNX Runtime's CUDA provider over a cache in the device's memory.

The cache is allocated by the driver and not by ONNX Runtime, whose arena would take more than was asked: the
graph's inputs and outputs are bound to its addresses. ONNX Runtime waits for its own stream at the end of
each run, and the cache's copies, which have a stream of their own, are waited for before one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagelet.models.errors import BackendError, BundleError, CapacityError, PageletError
from pagelet.models.manifest import Manifest
from pagelet.plugins.cuda_driver import CudaError, Driver, OutOfMemory
from pagelet.runtime.backends.base import ByteArray, Float32Array, StepBatch
from pagelet.runtime.backends.device_cache import DeviceArray, DeviceCache
from pagelet.runtime.backends.device_memory import DeviceMemory
from pagelet.runtime.backends.ort_session import (
    TOO_LITTLE,
    checked,
    import_runtime,
    load_provider,
    open_session,
)
from pagelet.runtime.cache_layout import CacheLayout

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding

_ELEMENTS = {"float16": 10, "bfloat16": 16, "int8": 3, "float8e4m3fn": 17}  # as ONNX numbers them
_OPTIONAL = {"position_ids", "attention_metadata"}  # of the graph's inputs
# By how much a logit may differ with what else is in the step, by the type of the activations: products and
# attention of other numbers of rows sum in another order. Taken to be three roundings (2^-11 or 2^-8,
# relative) of logits of magnitude 30; not measured.
_ROW_NOISE = {"f16": 0.05, "bf16": 0.4}


class OrtCudaBackend:
    """A session, the cache's memory, and one binding that lives as long as they do."""

    supports_trees = False  # the op sees a chain of tokens and nothing else

    def __init__(
        self,
        graph: Path,
        manifest: Manifest,
        layout: CacheLayout,
        *,
        max_rows: int,
        driver: Driver | None = None,
        runtime: Any = None,
    ) -> None:
        """Load `graph` and run the largest step once, so that what it needs is known to be there.

        Args:
            max_rows: the most rows of logits that one step asks for.
            driver: of the device, which belongs to the backend from here on; None: the first device.
            runtime: the module onnxruntime, or what has its functions.

        Raises:
            BackendError: there is no device, or no ONNX Runtime with CUDA, or it refuses the graph.
            BundleError: the graph's inputs and outputs are not those of the contract.
            CapacityError: the device's memory is too small.
        """
        self.layout = layout
        self.vocab_size = manifest.spec.vocab_size
        self.max_context = manifest.spec.max_context
        self.cache_type = manifest.cache_type
        self.row_noise = _ROW_NOISE[manifest.gpu.activations if manifest.gpu else "f16"]
        self._max_rows = max_rows
        self._logits: Float32Array = np.empty((0, self.vocab_size), np.float32)
        self._bound_rows = 0
        with _opening(graph), ExitStack() as resources:
            if driver is not None:
                resources.callback(driver.close)
            self._runtime = checked(runtime or import_runtime())
            if driver is None:
                driver = Driver.open()
                resources.callback(driver.close)
            self._driver = driver
            driver.make_current()
            self.fingerprint = (
                f"{manifest.fingerprint} {manifest.cache_type} {manifest.block_size} cuda "
                f"sm{driver.compute_capability} onnxruntime {self._runtime.__version__}"
            )
            memory = self._memory = DeviceMemory(driver)
            resources.callback(memory.free)
            load_provider(self._runtime)
            session = self._session = open_session(graph, self._runtime)
            resources.callback(self._forget)  # its memory is freed first
            cache = self._cache = DeviceCache(manifest.spec, manifest.cache_type, layout, memory)
            self._inputs = {value.name: value.type for value in session.get_inputs()}
            arrays = [array for array in cache.arrays if "_scale_cache." not in array.name]  # constants here
            _check_signature(session, arrays, layout)
            self._binding = session.io_binding()
            _bind_cache(self._binding, arrays, cache, self._inputs)
            self._warm_up()
            self._resources = resources.pop_all()

    def run(self, batch: StepBatch) -> Float32Array:
        rows = len(batch.logits_indices)
        if rows > self._max_rows:
            raise BackendError(
                f"a step asks for {rows} rows of logits; the backend was opened for {self._max_rows}. "
                "Open it with a larger max_rows."
            )
        if batch.ancestor_mask is not None:
            raise BackendError("a step has an ancestor_mask, but the target cuda verifies no trees.")
        with self._working("ONNX Runtime failed in a step"):
            return self._step(batch)

    def _step(self, batch: StepBatch) -> Float32Array:
        self._driver.synchronize(self._memory.stream)  # what was copied is there
        bind = self._binding.bind_cpu_input
        bind("input_ids", batch.input_ids)
        bind("cumulative_sequence_length", batch.cumulative_sequence_length)
        bind("past_seqlens", batch.past_seqlens)
        bind("logits_indices", batch.logits_indices)
        for group, table in enumerate(batch.block_tables):
            bind(f"block_table_{group}", table)
        if "position_ids" in self._inputs:
            bind("position_ids", batch.position_ids)
        if "attention_metadata" in self._inputs:
            lengths = np.diff(batch.cumulative_sequence_length)
            longest = int((batch.past_seqlens + lengths).max())
            # The last is a lower bound of the longest context, which is known exactly, not for many steps.
            bind("attention_metadata", np.asarray([lengths.max(), longest, longest], np.int32))
        logits = self._bound_logits(len(batch.logits_indices))
        self._binding.synchronize_inputs()
        self._session.run_with_iobinding(self._binding)
        return logits

    def _bound_logits(self, rows: int) -> Float32Array:
        """Host memory, which ONNX Runtime copies the logits into."""
        if rows > len(self._logits):
            self._logits = np.empty((rows, self.vocab_size), np.float32)
            self._bound_rows = 0
        logits = self._logits[:rows]
        if rows != self._bound_rows:
            value = self._runtime.OrtValue.ortvalue_from_numpy(logits)
            self._binding.bind_ortvalue_output("logits", value)
            self._bound_rows = rows
        return logits

    def _warm_up(self) -> None:
        """The largest step: kernels are loaded, and the arena gets what it will ever hold."""
        layout = self.layout
        fewest = min(group.num_blocks for group in layout.groups)
        tokens = min(layout.max_step_tokens, self.max_context, fewest * layout.block_size)
        blocks = np.arange(-(-tokens // layout.block_size), dtype=np.int32)[None]
        self._step(
            StepBatch(
                input_ids=np.zeros(tokens, np.int64),
                position_ids=np.arange(tokens, dtype=np.int64),
                cumulative_sequence_length=np.asarray([0, tokens], np.int32),
                past_seqlens=np.zeros(1, np.int32),
                block_tables=(blocks,) * len(layout.groups),
                logits_indices=np.zeros(self._max_rows, np.int64),
            )
        )
        # Most steps have few rows of logits: host memory for the most is not kept.
        self._logits, self._bound_rows = self._logits[:0].copy(), 0
        start = self._cache.address(self._cache.arrays[0])
        self._driver.memset(start, 0, self._cache.num_bytes, self._memory.stream)

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
        """With the device for this thread; errors become BackendErrors."""
        try:
            self._driver.make_current()
            yield
        except Exception as error:
            raise BackendError(f"{failure}: {error}") from error

    def _forget(self) -> None:
        self._session = self._binding = None

    def close(self) -> None:
        with suppress(CudaError):  # the device may have failed, or be closed already
            self._driver.make_current()
        self._resources.close()


def _check_signature(session: "InferenceSession", arrays: Sequence[DeviceArray], layout: CacheLayout) -> None:
    step = {"input_ids", "cumulative_sequence_length", "past_seqlens", "logits_indices"}
    tables = {f"block_table_{group}" for group in range(len(layout.groups))}
    for what, found, expected in (
        (
            "inputs",
            {value.name for value in session.get_inputs()} - _OPTIONAL,
            step | tables | {array.name for array in arrays},
        ),
        (
            "outputs",
            {value.name for value in session.get_outputs()},
            {"logits"} | {array.out_name for array in arrays},
        ),
    ):
        if found != expected:
            raise BundleError(
                f"the graph's {what} are not those of the contract: missing {sorted(expected - found)}, "
                f"unexpected {sorted(found - expected)}. Export the bundle again."
            )


def _bind_cache(
    binding: "IOBinding", arrays: Sequence[DeviceArray], cache: DeviceCache, types: dict[str, str]
) -> None:
    """Input and output of each array are the same memory of the device."""
    for array in arrays:
        kind = types[array.name].removeprefix("tensor(").removesuffix(")")
        where = "cuda", 0, _ELEMENTS[kind], list(array.shape), cache.address(array)
        binding.bind_input(array.name, *where)
        binding.bind_output(array.out_name, *where)


@contextmanager
def _opening(graph: Path) -> Iterator[None]:
    """Errors of the device and of ONNX Runtime become ours."""
    try:
        yield
    except PageletError:
        raise
    except Exception as error:
        if isinstance(error, OutOfMemory) or TOO_LITTLE.search(str(error)):
            raise CapacityError(
                f"{graph} cannot be opened: the device's memory is too small ({error}). Lower kv_memory or "
                "max_step_tokens, or close what else uses the device."
            ) from error
        raise BackendError(f"{graph} cannot be opened: {error}") from error
