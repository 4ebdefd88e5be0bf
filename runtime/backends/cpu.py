"""The CPU backend: ONNX Runtime over a bundle's graph, its caches bound once and written in place."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagelet.models.errors import BackendError, BundleError, CapacityError
from pagelet.models.manifest import Manifest
from pagelet.models.spec import ModelSpec
from pagelet.runtime.backends.base import CacheLayout, Float32Array, StepBatch

if TYPE_CHECKING:
    from onnxruntime import IOBinding, SessionOptions

_BYTES_PER_VALUE = {"f32": 4}


def bytes_per_token(spec: ModelSpec, cache_type: str) -> int:
    """Bytes of keys and values of one token: 2 x layers x KV heads x head size x bytes per value."""
    if cache_type not in _BYTES_PER_VALUE:
        known = ", ".join(_BYTES_PER_VALUE)
        raise BundleError(f"the bundle's cache type is {cache_type!r}; the CPU backend knows {known}.")
    return 2 * spec.num_layers * spec.kv_size * _BYTES_PER_VALUE[cache_type]


def plan_cache(manifest: Manifest, num_bytes: int) -> CacheLayout:
    """The most blocks that fit into `num_bytes`.

    Raises:
        CapacityError: not even one.
    """
    block_bytes = manifest.block_size * bytes_per_token(manifest.spec, manifest.cache_type)
    if num_bytes < block_bytes:
        raise CapacityError(
            f"{num_bytes} bytes are given to the KV cache, but one block of {manifest.block_size} tokens "
            f"takes {block_bytes}. Raise kv_memory."
        )
    return CacheLayout(num_bytes // block_bytes, manifest.block_size, block_bytes)


class CpuBackend:
    """An ONNX Runtime session, the caches' memory, and one binding that lives as long as they do."""

    def __init__(
        self, graph: Path, manifest: Manifest, layout: CacheLayout, *, threads: int, max_rows: int
    ) -> None:
        """Load `graph`; `max_rows` is the most rows of logits that one step asks for.

        Raises:
            BackendError: ONNX Runtime or the op library is missing, or refuses the graph.
            BundleError: the graph's inputs and outputs are not those of the contract.
        """
        self.layout = layout
        self.vocab_size = manifest.spec.vocab_size
        self.max_context = manifest.spec.max_context
        self._logits: Float32Array = np.empty((max_rows, self.vocab_size), np.float32)
        self._bound_rows = 0
        try:
            import onnxruntime

            self._ortvalue_from_numpy = onnxruntime.OrtValue.ortvalue_from_numpy
            options = _session_options(threads)
            session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BackendError(f"ONNX Runtime cannot load {graph}: {error}") from error
        _check_signature(
            {i.name for i in session.get_inputs()}, {o.name for o in session.get_outputs()}, manifest.spec
        )
        self._session = session
        self._binding = session.io_binding()
        # ONNX Runtime points into these arrays without owning them.
        self._caches = _bind_caches(self._binding, layout, manifest.spec)

    def run(self, batch: StepBatch) -> Float32Array:
        bind = self._binding.bind_cpu_input
        bind("input_ids", batch.input_ids)
        bind("position_ids", batch.position_ids)
        bind("cumulative_sequence_length", batch.cumulative_sequence_length)
        bind("past_seqlens", batch.past_seqlens)
        for group, table in enumerate(batch.block_tables):
            bind(f"block_table_{group}", table)
        bind("logits_indices", batch.logits_indices)
        rows = len(batch.logits_indices)
        logits = self._logits[:rows]
        if rows != self._bound_rows:
            self._binding.bind_ortvalue_output("logits", self._ortvalue_from_numpy(logits))
            self._bound_rows = rows
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed in a step: {error}") from error
        return logits

    def close(self) -> None:
        self._session = self._binding = None
        self._caches = []


def _session_options(threads: int) -> "SessionOptions":
    import onnxruntime

    from pagelet.plugins.native import register_ops

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Shapes differ from step to step, so a planned memory pattern would never be used twice.
    options.enable_mem_pattern = False
    options.use_deterministic_compute = True
    options.log_severity_level = 3
    # Threads spin within a step, where work follows at once, and sleep between steps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    register_ops(options)
    return options


def _check_signature(inputs: set[str], outputs: set[str], spec: ModelSpec) -> None:
    layers = range(spec.num_layers)
    step = "input_ids position_ids cumulative_sequence_length past_seqlens block_table_0 logits_indices"
    caches = [f"{kind}_cache{{}}.{layer}" for kind in ("key", "value") for layer in layers]
    for what, found, expected in (
        ("inputs", inputs, {*step.split(), *(name.format("") for name in caches)}),
        ("outputs", outputs, {"logits", *(name.format("_out") for name in caches)}),
    ):
        if found != expected:
            raise BundleError(
                f"the graph's {what} are not those of the contract: missing {sorted(expected - found)}, "
                f"unexpected {sorted(found - expected)}. Export the bundle again."
            )


def _bind_caches(binding: "IOBinding", layout: CacheLayout, spec: ModelSpec) -> list[Float32Array]:
    """Allocate [blocks, block_size, kv_heads, head_dim] per layer; input and output are the same memory."""
    from onnxruntime import OrtValue

    shape = (layout.num_blocks, layout.block_size, spec.num_kv_heads, spec.head_dim)
    caches = []
    for layer in range(spec.num_layers):
        for kind in ("key", "value"):
            # Zeroed pages are mapped when they are first written: a large pool costs nothing until used.
            caches.append(np.zeros(shape, np.float32))
            value = OrtValue.ortvalue_from_numpy(caches[-1])
            binding.bind_ortvalue_input(f"{kind}_cache.{layer}", value)
            binding.bind_ortvalue_output(f"{kind}_cache_out.{layer}", value)
    return caches
