"""The seam between the runtime and what computes: a step's inputs, and who runs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagelet.runtime.cache_layout import CacheLayout

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
ByteArray = NDArray[np.uint8]


@dataclass(frozen=True)
class StepBatch:
    """One ragged step: T tokens of S sequences, concatenated without padding.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T].
        cumulative_sequence_length: int32 [S+1], row offsets of each sequence.
        past_seqlens: int32 [S], tokens of each sequence that the cache holds already.
        block_tables: one int32 [S, max_blocks] per group of layers with one window; -1 is not mapped, which
            only blocks before the window of the sequence's first row, or behind its last row, may be.
        logits_indices: int64 [R], the rows that need logits, ascending; R is at least 1.
        ancestor_mask: int32 [T, W], or None where the rows of each sequence are a chain. Bit j % 32 of word
            j / 32 of a row says that it descends from row j of its own sequence; W * 32 is at least the
            most rows of a sequence. A sequence whose rows are no chain has at most 64. Its row's position is
            past + the number of its ancestors. The fewer rows follow another than their parent, the cheaper
            a tree is: depth first is a good order.
    """

    input_ids: Int64Array
    position_ids: Int64Array
    cumulative_sequence_length: Int32Array
    past_seqlens: Int32Array
    block_tables: tuple[Int32Array, ...]
    logits_indices: Int64Array
    ancestor_mask: Int32Array | None = None


class Backend(Protocol):
    """Runs steps over a KV cache that it allocated once. Called by one thread at a time.

    A backend that has nothing to run uses no processor time.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Tokens of one sequence that the model has positions for."""

    @property
    def layout(self) -> CacheLayout: ...

    @property
    def fingerprint(self) -> str:
        """Names all that the cache's values depend on beside the tokens: weights, graph, cache type."""

    @property
    def cache_type(self) -> str:
        """The name of a row in `models.cache`."""

    @property
    def row_noise(self) -> float:
        """By how much a logit may differ with what else is in the step; 0: not by a bit."""

    @property
    def supports_trees(self) -> bool:
        """Whether a batch may have an `ancestor_mask`."""

    def run(self, batch: StepBatch) -> Float32Array:
        """Write the batch's keys and values into the cache; logits float32 [R, vocab].

        The arrays of `batch` and the logits are valid until the next run, and not kept.

        Raises:
            BackendError: the engine underneath failed, or the batch has an `ancestor_mask` that this backend
                does not support. The cache of the batch's own sequences is
                undefined then, everything else is as it was.
        """

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block to block (from, to), one after the other, in every layer of a group.

        Raises:
            BackendError: it failed; the blocks that were copied into are undefined then.
        """

    def copy_slots(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy one token's keys and values from slot to slot, one after the other, in every layer of a group.

        A slot is block * block_size + offset. After a path of a tree is accepted, its rows move to past,
        past + 1, …: where plain decoding would have written them, and with the same bits.
        """

    def read_blocks(self, group: int, blocks: Sequence[int]) -> ByteArray:
        """Copies of blocks of a group, uint8 [len(blocks), block_bytes]: what all its layers have there."""

    def write_blocks(self, group: int, blocks: Sequence[int], rows: Sequence[ByteArray]) -> None:
        """Put into each block of a group a row that `read_blocks` gave, here or in another process."""

    def close(self) -> None:
        """Free the cache and the model; nothing runs afterwards. Closing twice is fine."""
