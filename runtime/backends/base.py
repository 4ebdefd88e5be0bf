"""The seam between the runtime and what computes: a step's inputs, and who runs them."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class CacheLayout:
    """Size of the KV cache: `num_blocks` blocks of `block_size` tokens, `block_bytes` over all layers."""

    num_blocks: int
    block_size: int
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True)
class StepBatch:
    """One ragged step: T tokens of S sequences, concatenated without padding.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T].
        cumulative_sequence_length: int32 [S+1], row offsets of each sequence.
        past_seqlens: int32 [S], tokens of each sequence that the cache holds already.
        block_tables: one int32 [S, max_blocks] per group of layers with one window; -1 is not mapped.
        logits_indices: int64 [R], the rows that need logits, ascending; R is at least 1.
    """

    input_ids: Int64Array
    position_ids: Int64Array
    cumulative_sequence_length: Int32Array
    past_seqlens: Int32Array
    block_tables: tuple[Int32Array, ...]
    logits_indices: Int64Array


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

    def run(self, batch: StepBatch) -> Float32Array:
        """Write the batch's keys and values into the cache; logits float32 [R, vocab].

        The arrays of `batch` and the logits are valid until the next run, and not kept.

        Raises:
            BackendError: the engine underneath failed. The cache of the batch's own sequences is
                undefined then, everything else is as it was.
        """

    def close(self) -> None:
        """Free the cache and the model; nothing runs afterwards. Closing twice is fine."""
