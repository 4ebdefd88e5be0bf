"""The KV cache in a device's memory: one allocation, in which each array is contiguous and stands alone.

A kernel sees an array as [blocks of its group, block_size, KV heads, head size], or as its scales without the
last axis, and a block table's numbers are its blocks'.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from pagelet.models.cache import cache_type
from pagelet.models.spec import ModelSpec
from pagelet.runtime.backends.base import ByteArray
from pagelet.runtime.backends.cpu_cache import cache_names
from pagelet.runtime.backends.device_memory import DeviceMemory, aligned
from pagelet.runtime.cache_layout import CacheLayout


@dataclass(frozen=True)
class DeviceArray:
    """One input of the graph with its output, which are the same memory.

    Attributes:
        group: of its layer.
        shape: [blocks of the group, block_size, KV heads, head size], or of its scales.
        offset: bytes from the allocation's start.
        slot_bytes: of one token.
        block_bytes: of one block.
        columns: where its part is in what `DeviceCache.read_blocks` gives of a block.
    """

    name: str
    out_name: str
    group: int
    shape: tuple[int, ...]
    offset: int
    slot_bytes: int
    block_bytes: int
    columns: slice


class DeviceCache:
    """The arrays, allocated once.

    Attributes:
        arrays: in the order of `cache_names`.
        num_bytes: of the allocation.
    """

    def __init__(self, spec: ModelSpec, type_name: str, layout: CacheLayout, memory: DeviceMemory) -> None:
        """Allocate a cache of zeros.

        Raises:
            CapacityError: the device has no room for it.
        """
        self.arrays = tuple(_placed(spec, type_name, layout))
        last = self.arrays[-1]
        self.num_bytes = last.offset + aligned(last.shape[0] * last.block_bytes)
        self._layout = layout
        self._driver, self._stream = memory.driver, memory.stream
        self._start = memory.malloc(
            self.num_bytes, "the KV cache", "Lower kv_memory, or free memory of the device."
        )
        # Blocks are saved whole: what their unused slots held before is nobody's to read.
        self._driver.memset(self._start, 0, self.num_bytes, self._stream)

    def address(self, array: DeviceArray) -> int:
        return self._start + array.offset

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for array in self._of_group(group):
            for source, target in pairs:
                self._copy(array, source * array.block_bytes, target * array.block_bytes, array.block_bytes)

    def copy_slots(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        # A block's slots follow one another, and its last one is followed by the next block's first.
        for array in self._of_group(group):
            for source, target in pairs:
                self._copy(array, source * array.slot_bytes, target * array.slot_bytes, array.slot_bytes)

    def read_blocks(self, group: int, blocks: Sequence[int]) -> ByteArray:
        """uint8 [len(blocks), block bytes]: of each block, its part of every array in the order of `arrays`.

        That is the order of the CPU's cache too; the values are of this device's kernels.
        """
        arrays = self._of_group(group)
        data: ByteArray = np.empty((len(blocks), self._layout.groups[group].block_bytes), np.uint8)
        for array in arrays:
            for row, block in enumerate(blocks):
                target = data[row, array.columns].ctypes.data
                source = self.address(array) + block * array.block_bytes
                self._driver.to_host(target, source, array.block_bytes, self._stream)
        self._driver.synchronize(self._stream)
        return data

    def write_blocks(self, group: int, blocks: Sequence[int], rows: Sequence[ByteArray]) -> None:
        """Rows as `read_blocks` gives them."""
        whole = [np.ascontiguousarray(row) for row in rows]
        for array in self._of_group(group):
            for row, block in zip(whole, blocks, strict=True):
                target = self.address(array) + block * array.block_bytes
                self._driver.to_device(
                    target, row[array.columns].ctypes.data, array.block_bytes, self._stream
                )
        self._driver.synchronize(self._stream)  # until then the rows must stay

    def _of_group(self, group: int) -> list[DeviceArray]:
        return [array for array in self.arrays if array.group == group]

    def _copy(self, array: DeviceArray, source: int, target: int, num_bytes: int) -> None:
        start = self.address(array)
        self._driver.on_device(start + target, start + source, num_bytes, self._stream)


def _placed(spec: ModelSpec, type_name: str, layout: CacheLayout) -> Iterator[DeviceArray]:
    """Each array behind the one before."""
    row = cache_type(type_name)
    offset, ends = 0, [0] * len(layout.groups)
    for name, out_name, layer in cache_names(spec, type_name):
        group, kind = spec.group_of(layer), spec.layers[layer]
        is_scale = "_scale_cache." in name
        heads = (kind.num_kv_heads,) if is_scale else (kind.num_kv_heads, kind.head_dim)
        slot_bytes = prod(heads) * (row.bytes_per_scale if is_scale else row.bytes_per_value)
        block_bytes = layout.block_size * slot_bytes
        num_blocks = layout.groups[group].num_blocks
        columns = slice(ends[group], ends[group] + block_bytes)
        ends[group] = columns.stop
        shape = (num_blocks, layout.block_size, *heads)
        yield DeviceArray(name, out_name, group, shape, offset, slot_bytes, block_bytes, columns)
        offset += aligned(num_blocks * block_bytes)
