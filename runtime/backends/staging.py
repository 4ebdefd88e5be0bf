"""A step's small inputs on their way to the device: packed into one pinned buffer, copied at once.

Shapes say where each input lies: steps of the same shapes have the same addresses, which a CUDA graph needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.runtime.backends.base import StepBatch
from pagelet.runtime.backends.device_memory import DeviceMemory, aligned

Shape = tuple[int, ...]

_INT64 = ("input_ids", "position_ids", "logits_indices")
# A step without trees. TensorRT refuses a null pointer, not a tensor without elements.
NO_TREES: Shape = (0, 0)


def step_shapes(
    *, tokens: int, sequences: int, logits: int, table_width: int, groups: int, mask: Shape = NO_TREES
) -> dict[str, Shape]:
    """The shapes of a step's small inputs by their names."""
    return {
        "input_ids": (tokens,),
        "position_ids": (tokens,),
        "cumulative_sequence_length": (sequences + 1,),
        "past_seqlens": (sequences,),
        **{f"block_table_{group}": (sequences, table_width) for group in range(groups)},
        "ancestor_mask": mask,
        "logits_indices": (logits,),
    }


def staged_bytes(shapes: Mapping[str, Shape]) -> int:
    """Bytes of inputs of these shapes as they are packed."""
    return sum(aligned(prod(shape) * _dtype(name).itemsize) for name, shape in shapes.items())


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.int64 if name in _INT64 else np.int32)


@dataclass(frozen=True)
class StagedInputs:
    """Where the inputs of a step of certain shapes are.

    Attributes:
        shapes, views, addresses: by name: the shape, its pinned memory, where it is on the device.
        num_bytes: of them all, from the beginning of the buffers.
    """

    shapes: Mapping[str, Shape]
    views: Mapping[str, NDArray[Any]]
    addresses: Mapping[str, int]
    num_bytes: int

    def fill(self, batch: StepBatch) -> None:
        """Write a batch into the pinned memory.

        Where the shapes have room for more sequences than the batch has, these have one row each (token 0 at
        position 0), nothing before it and no block, so that attention writes and reads nothing of theirs.
        """
        views, tokens, sequences = self.views, len(batch.input_ids), len(batch.past_seqlens)
        _padded(views["input_ids"], batch.input_ids, 0)
        _padded(views["position_ids"], batch.position_ids, 0)
        offsets = views["cumulative_sequence_length"]
        _padded(
            offsets,
            batch.cumulative_sequence_length,
            np.arange(tokens + 1, tokens + len(offsets) - sequences),
        )
        _padded(views["past_seqlens"], batch.past_seqlens, 0)
        for group, blocks in enumerate(batch.block_tables):
            table = views[f"block_table_{group}"]
            width = min(table.shape[1], blocks.shape[1])
            table[:sequences, :width] = blocks[:, :width]
            table[:sequences, width:] = -1
            table[sequences:] = -1
        if batch.ancestor_mask is not None:
            views["ancestor_mask"][:] = batch.ancestor_mask
        rows = views["logits_indices"]
        _padded(rows, batch.logits_indices, np.arange(tokens, tokens + len(rows) - len(batch.logits_indices)))


def _padded(view: NDArray[Any], values: NDArray[Any], rest: NDArray[Any] | int) -> None:
    view[: len(values)] = values
    if len(view) > len(values):
        view[len(values) :] = rest


class InputStaging:
    """The two buffers, allocated once."""

    def __init__(self, memory: DeviceMemory, num_bytes: int) -> None:
        """Allocate room for `num_bytes` as `staged_bytes` counts them.

        Raises:
            CapacityError: no room.
        """
        purpose, remedy = "the staging of a step's inputs", "Lower kv_memory or max_context."
        self._driver, self._stream = memory.driver, memory.stream
        self._device = memory.malloc(num_bytes, purpose, remedy)
        self._pinned = memory.pinned(num_bytes, purpose, remedy)
        self._source = self._pinned.ctypes.data

    def place(self, shapes: Mapping[str, Shape]) -> StagedInputs:
        """Where inputs of these shapes go, one behind the other; they fit, which the caller sees to."""
        views: dict[str, NDArray[Any]] = {}
        addresses: dict[str, int] = {}
        offset = 0
        for name, shape in shapes.items():
            dtype = _dtype(name)
            num_bytes = prod(shape) * dtype.itemsize
            views[name] = self._pinned[offset : offset + num_bytes].view(dtype).reshape(shape)
            addresses[name] = self._device + offset
            offset += aligned(num_bytes)
        assert offset <= len(self._pinned)
        return StagedInputs(shapes, views, addresses, offset)

    def send(self, inputs: StagedInputs) -> None:
        """Put the copy of all inputs into the stream; the pinned memory must stay until it has run."""
        self._driver.to_device(self._device, self._source, inputs.num_bytes, self._stream)
