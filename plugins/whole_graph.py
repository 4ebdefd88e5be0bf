"""One text through a bundle's whole graph from an empty cache, with a look at the values inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.plugins.session import open_session

Float32 = NDArray[np.float32]

# NumPy's type and ONNX's number of an element; NumPy has no FP8: its bits are bytes.
_ELEMENTS: dict[str, tuple[Any, int]] = {
    "f32": (np.float32, 1),
    "f16": (np.float16, 10),
    "int8": (np.int8, 3),
    "fp8": (np.uint8, 17),
}
_SCALED = ("int8", "fp8")


@dataclass(frozen=True)
class CacheArrays:
    """The caches of a graph: `type` is one of "f32", "f16", "int8", "fp8"; a block has `block_size` tokens.

    Attributes:
        heads: (KV heads, head size) of each layer that has keys of its own.
        num_groups: groups of layers with the same window, each of which has a block table.
    """

    type: str
    block_size: int
    heads: Mapping[int, tuple[int, int]]
    num_groups: int

    def allocate(self, length: int) -> dict[str, tuple[NDArray[Any], int]]:
        """Empty caches for one text of `length` tokens: graph input to array and element type."""
        dtype, element = _ELEMENTS[self.type]
        arrays: dict[str, tuple[NDArray[Any], int]] = {}
        for layer, (num_kv_heads, head_dim) in self.heads.items():
            shape = (-(-length // self.block_size), self.block_size, num_kv_heads)
            for kind in ("key", "value"):
                arrays[f"{kind}_cache.{layer}"] = np.zeros((*shape, head_dim), dtype), element
                if self.type in _SCALED:
                    arrays[f"{kind}_scale_cache.{layer}"] = np.zeros(shape, np.float32), 1
        return arrays


class WholeGraph:
    """A session over `graph` whose values named in `taps`, float32 [T, …], can be read as well."""

    def __init__(self, graph: Path, caches: CacheArrays, taps: Sequence[str], *, threads: int = 0) -> None:
        """Load the graph.

        Raises:
            FileNotFoundError: the op library is missing.
            RuntimeError, or an exception of ONNX Runtime's own: the graph cannot be loaded, or lacks a tap.
        """
        self._session = open_session(graph, threads=threads, taps=taps)
        self._caches = caches
        self._taps = list(taps)

    def run(
        self, token_ids: Sequence[int], position_ids: Sequence[int], logits_rows: Sequence[int]
    ) -> tuple[Float32, list[Float32]]:
        """Logits [len(logits_rows), vocab] and the taps' values, of all rows.

        Raises:
            An exception of ONNX Runtime's own: inputs that the graph does not take.
        """
        from onnxruntime import OrtValue

        binding = self._session.io_binding()
        for name, value in self._step(token_ids, position_ids, logits_rows).items():
            binding.bind_cpu_input(name, value)
        for name, (array, element) in self._caches.allocate(len(token_ids)).items():
            cache = OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(name.replace(".", "_out.", 1), cache)
        for name in ("logits", *self._taps):
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        logits, *taps = (value.numpy() for value in binding.get_outputs()[-len(self._taps) - 1 :])
        return logits, taps

    def _step(
        self, token_ids: Sequence[int], position_ids: Sequence[int], logits_rows: Sequence[int]
    ) -> dict[str, NDArray[Any]]:
        length = len(token_ids)
        blocks = np.arange(-(-length // self._caches.block_size), dtype=np.int32)
        return {
            "input_ids": np.array(token_ids, np.int64),
            "position_ids": np.array(position_ids, np.int64),
            "cumulative_sequence_length": np.array([0, length], np.int32),
            "past_seqlens": np.zeros(1, np.int32),
            "logits_indices": np.array(logits_rows, np.int64),
            "ancestor_mask": np.empty((0, 0), np.int32),
            **{f"block_table_{group}": blocks[None] for group in range(self._caches.num_groups)},
        }
