"""The CPU backend: ONNX Runtime over a bundle's graph, its caches bound once and written in place."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagelet.models.errors import BackendError, BundleError
from pagelet.models.manifest import Manifest
from pagelet.plugins.session import open_session
from pagelet.runtime.backends.base import ByteArray, Float32Array, Int32Array, StepBatch
from pagelet.runtime.backends.cpu_cache import CpuCache, cache_names, cache_shape
from pagelet.runtime.cache_layout import CacheLayout
from pagelet.runtime.cores import CORES

__all__ = ["CpuBackend", "cache_shape"]

if TYPE_CHECKING:
    from onnxruntime import IOBinding

_NO_TREES: Int32Array = np.empty((0, 0), np.int32)


class CpuBackend:
    """An ONNX Runtime session, the caches' memory, and one binding that lives as long as they do."""

    row_noise = 0.0  # every op reduces a row in one order: docs/exactness.md

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
        self.cache_type = manifest.cache_type
        self.fingerprint = f"{manifest.fingerprint} {manifest.cache_type} {manifest.block_size}"
        self._threads = threads
        self._max_rows = max_rows
        self._logits: Float32Array = np.empty((0, self.vocab_size), np.float32)
        self._bound_rows = 0
        try:
            import onnxruntime

            self._ortvalue_from_numpy = onnxruntime.OrtValue.ortvalue_from_numpy
            session = open_session(graph, threads=threads)
        except Exception as error:
            raise BackendError(f"ONNX Runtime cannot load {graph}: {error}") from error
        inputs = {i.name for i in session.get_inputs()}
        # Bundles that were exported before trees were known lack this input.
        self.supports_trees = "ancestor_mask" in inputs
        _check_signature(inputs - {"ancestor_mask"}, {o.name for o in session.get_outputs()}, manifest)
        self._session = session
        self._binding = session.io_binding()
        self._trees_bound = self.supports_trees
        self._bind_trees(None)
        self._cache = CpuCache(manifest.spec, manifest.cache_type, layout)
        _bind_cache(self._binding, self._cache)

    def run(self, batch: StepBatch) -> Float32Array:
        rows = len(batch.logits_indices)
        if rows > self._max_rows:
            raise BackendError(
                f"a step asks for {rows} rows of logits; the backend was opened for {self._max_rows}. "
                "Open it with a larger max_rows."
            )
        bind = self._binding.bind_cpu_input
        bind("input_ids", batch.input_ids)
        bind("position_ids", batch.position_ids)
        bind("cumulative_sequence_length", batch.cumulative_sequence_length)
        bind("past_seqlens", batch.past_seqlens)
        for group, (table, stride) in enumerate(zip(batch.block_tables, self._cache.strides, strict=True)):
            bind(f"block_table_{group}", table * np.int32(stride))  # what is negative stays so
        bind("logits_indices", batch.logits_indices)
        self._bind_trees(batch.ancestor_mask)
        if rows > len(self._logits):
            self._logits = np.empty((rows, self.vocab_size), np.float32)
        logits = self._logits[:rows]
        if rows != self._bound_rows:
            self._binding.bind_ortvalue_output("logits", self._ortvalue_from_numpy(logits))
            self._bound_rows = rows
        taken = CORES.acquire(self._threads)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed in a step: {error}") from error
        finally:
            CORES.release(taken)
        return logits

    def _bind_trees(self, mask: Int32Array | None) -> None:
        """Steps without trees, one after another, leave the empty mask bound."""
        if mask is None and not self._trees_bound:
            return
        if not self.supports_trees:
            raise BackendError(
                "a step has an ancestor_mask, but the bundle's graph has no such input. Export the bundle "
                "again to verify trees of drafted tokens."
            )
        self._binding.bind_cpu_input("ancestor_mask", _NO_TREES if mask is None else mask)
        self._trees_bound = mask is not None

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._cache.copy_blocks(group, pairs)

    def copy_slots(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._cache.copy_slots(group, pairs)

    def read_blocks(self, group: int, blocks: Sequence[int]) -> ByteArray:
        return self._cache.read_blocks(group, blocks)

    def write_blocks(self, group: int, blocks: Sequence[int], rows: Sequence[ByteArray]) -> None:
        self._cache.write_blocks(group, blocks, rows)

    def close(self) -> None:
        self._session = self._binding = None
        self._cache.free()


def _check_signature(inputs: set[str], outputs: set[str], manifest: Manifest) -> None:
    spec, cache_type = manifest.spec, manifest.cache_type
    step = "input_ids position_ids cumulative_sequence_length past_seqlens logits_indices"
    tables = {f"block_table_{group}" for group in range(len(spec.window_groups))}
    caches = {name for name, _, _ in cache_names(spec, cache_type)}
    written = {name for _, name, _ in cache_names(spec, cache_type)}
    for what, found, expected in (
        ("inputs", inputs, {*step.split()} | tables | caches),
        ("outputs", outputs, {"logits"} | written),
    ):
        if found != expected:
            raise BundleError(
                f"the graph's {what} are not those of the contract: missing {sorted(expected - found)}, "
                f"unexpected {sorted(found - expected)}. Export the bundle again."
            )


def _bind_cache(binding: "IOBinding", cache: CpuCache) -> None:
    """Input and output of each array are the same memory, which ONNX Runtime points into without owning."""
    from onnxruntime import OrtValue

    for array in cache.arrays:
        value = OrtValue.ortvalue_from_numpy_with_onnx_type(array.tensor, array.element)
        binding.bind_ortvalue_input(array.name, value)
        binding.bind_ortvalue_output(array.out_name, value)
