"""The KV cache in this machine's memory: arrays for each layer's keys and values, and for their scales.

All arrays of a group with the same kind of element share one region, interleaved block by block:

    block 0 of array 0 | block 0 of array 1 | … | block 1 of array 0 | block 1 of array 1 | …

So the pages that are written are those of the blocks in use, however large a page is. To the ops, each array
begins at its own block of the region, and a block table's numbers are multiplied by the number of arrays.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagelet.models.cache import cache_type
from pagelet.models.errors import BundleError, CapacityError
from pagelet.models.manifest import Manifest
from pagelet.models.spec import ModelSpec
from pagelet.runtime.backends.base import ByteArray
from pagelet.runtime.cache_layout import CacheLayout, CacheShape

Array: TypeAlias = NDArray[Any]

_FLOAT = 1
_MAX_BLOCK = 2**31 - 1  # block tables are int32
# The memory's dtype, and ONNX's number of the element type. NumPy has no FP8: its bits are bytes.
_ELEMENTS: dict[str, tuple[type[np.generic], int]] = {
    "f32": (np.float32, _FLOAT),
    "f16": (np.float16, 10),
    "int8": (np.int8, 3),
    "fp8": (np.uint8, 17),
}


def cache_shape(manifest: Manifest, max_step_tokens: int) -> CacheShape:
    """What a cache of this model consists of.

    Raises:
        BundleError: the bundle's cache type is not known here.
    """
    if manifest.cache_type not in _ELEMENTS:
        known = ", ".join(_ELEMENTS)
        raise BundleError(
            f"the bundle's cache type is {manifest.cache_type!r}; the CPU backend knows {known}."
        )
    return CacheShape.of(manifest.spec, manifest.cache_type, manifest.block_size, max_step_tokens)


def cache_names(spec: ModelSpec, type_name: str) -> Iterator[tuple[str, str, int]]:
    """(graph input, graph output, layer) of each array."""
    kinds = ["key_cache", "value_cache"]
    if cache_type(type_name).bytes_per_scale:
        kinds += ["key_scale_cache", "value_scale_cache"]
    for layer in spec.cache_owners:
        for kind in kinds:
            yield f"{kind}.{layer}", f"{kind}_out.{layer}", layer


@dataclass(frozen=True)
class CacheArray:
    """One graph input with its output, which are the same memory.

    Attributes:
        group: of its layer.
        memory: [blocks of the group, block_size, kv_heads, head_dim], of the cache type; or the scales,
            float32 [blocks of the group, block_size, kv_heads]. Not contiguous.
        tensor: what the graph sees: the region from the array's first block to its last one, contiguous.
        element: ONNX's number of its element type.
    """

    name: str
    out_name: str
    group: int
    memory: Array
    tensor: Array
    element: int


class CpuCache:
    """The arrays, allocated once.

    Attributes:
        arrays: in the order of `cache_names`.
        strides: of each group, how far one block of an array is from the next, in blocks.
    """

    def __init__(self, spec: ModelSpec, type_name: str, layout: CacheLayout) -> None:
        """Allocate a cache.

        Raises:
            CapacityError: more blocks than a block table can number.
        """
        layers = {layer: spec.group_of(layer) for layer in spec.cache_owners}
        self.strides = [2 * [*layers.values()].count(group) for group in range(len(layout.groups))]
        self.arrays: list[CacheArray] = []
        self._block_size = layout.block_size
        self._regions: dict[tuple[int, bool], Array] = {}
        placed: Counter[tuple[int, bool]] = Counter()
        for name, out_name, layer in cache_names(spec, type_name):
            key = group, scales = layers[layer], "_scale_cache." in name
            dtype, element = (np.float32, _FLOAT) if scales else _ELEMENTS[type_name]
            num_blocks, stride = layout.groups[group].num_blocks, self.strides[group]
            if key not in self._regions:
                _check_numbers(num_blocks, stride)
                kind = spec.layers[layer]
                row = (layout.block_size, kind.num_kv_heads, *(() if scales else (kind.head_dim,)))
                # Zeroed pages are mapped when they are first written: a large pool costs nothing until used.
                self._regions[key] = np.zeros((num_blocks * stride, *row), dtype)
            tensor = self._regions[key][placed[key] :][: (num_blocks - 1) * stride + 1]
            placed[key] += 1
            self.arrays.append(CacheArray(name, out_name, group, tensor[::stride], tensor, element))

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for blocks in self._blocks_of(group):
            for source, target in pairs:
                blocks[target] = blocks[source]

    def copy_slots(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for blocks in self._blocks_of(group):
            slots = blocks.swapaxes(1, 2)
            for source, target in pairs:
                slots[divmod(target, self._block_size)] = slots[divmod(source, self._block_size)]

    def _blocks_of(self, group: int) -> Iterator[Array]:
        """Each region of a group as [blocks, arrays, block_size, …]."""
        for (owner, _), region in self._regions.items():
            if owner == group:
                yield region.reshape(-1, self.strides[group], *region.shape[1:])

    def read_blocks(self, group: int, blocks: Sequence[int]) -> ByteArray:
        arrays = [array.memory for array in self.arrays if array.group == group]
        data = np.empty((len(blocks), sum(memory[0].nbytes for memory in arrays)), np.uint8)
        for memory, columns in zip(arrays, _columns(arrays), strict=True):
            # One block at a time: no second copy of them all.
            for row, block in enumerate(blocks):
                data[row, columns] = memory[block].reshape(-1).view(np.uint8)
        return data

    def write_blocks(self, group: int, blocks: Sequence[int], rows: Sequence[ByteArray]) -> None:
        arrays = [array.memory for array in self.arrays if array.group == group]
        for memory, columns in zip(arrays, _columns(arrays), strict=True):
            for row, block in zip(rows, blocks, strict=True):
                memory[block].reshape(-1).view(np.uint8)[:] = row[columns]

    def free(self) -> None:
        self.arrays.clear()
        self._regions.clear()


def _columns(arrays: Sequence[Array]) -> list[slice]:
    """Where each array's part of a block is in its bytes."""
    ends = np.cumsum([memory[0].nbytes for memory in arrays]).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _check_numbers(num_blocks: int, stride: int) -> None:
    if num_blocks * stride > _MAX_BLOCK:
        raise CapacityError(
            f"{num_blocks} blocks of {stride} arrays are more than a block table can number. "
            "Lower kv_memory, or export with a larger block size."
        )
