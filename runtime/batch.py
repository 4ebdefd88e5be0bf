"""StepBuffers: the arrays of a step's inputs, allocated once and filled anew in each step."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagelet.runtime.backends.base import Int32Array, Int64Array, StepBatch
from pagelet.runtime.scheduler import Run, S

Int = TypeVar("Int", np.int32, np.int64)


class StepBuffers:
    """Holds a StepBatch of up to `max_tokens` tokens of up to `max_sequences` sequences."""

    def __init__(self, *, max_tokens: int, max_sequences: int, max_blocks: int, num_groups: int) -> None:
        self._input_ids: Int64Array = np.zeros(max_tokens, np.int64)
        self._position_ids: Int64Array = np.zeros(max_tokens, np.int64)
        self._offsets: Int32Array = np.zeros(max_sequences + 1, np.int32)
        self._past: Int32Array = np.zeros(max_sequences, np.int32)
        self._tables: list[Int32Array] = [
            np.zeros((max_sequences, max_blocks), np.int32) for _ in range(num_groups)
        ]
        self._logits: Int64Array = np.zeros(max_tokens, np.int64)

    def fill(self, runs: list[Run[S]]) -> StepBatch:
        """Views of the buffers, valid until the next call; row r of the logits belongs to the runs in order.

        Where no run wants logits the batch asks for one row, since R is at least 1.
        """
        # Lists first: an assignment to an array costs as much for one number as for sixteen.
        tokens: list[int] = []
        positions: list[int] = []
        offsets: list[int] = [0]
        rows: list[int] = []
        for index, run in enumerate(runs):
            last = run.past + run.count
            tokens += run.sequence.tokens[run.past : last]
            positions += range(run.past, last)
            offsets.append(len(tokens))
            rows += range(len(tokens) - run.num_logits, len(tokens))
            # 4 bytes per block: a copy of the row is cheaper than to track what changed in it.
            for rows_of_group, table in zip(self._tables, run.sequence.cache.tables, strict=True):
                rows_of_group[index] = table.blocks
        return StepBatch(
            _filled(self._input_ids, tokens),
            _filled(self._position_ids, positions),
            _filled(self._offsets, offsets),
            _filled(self._past, [run.past for run in runs]),
            tuple(table[: len(runs)] for table in self._tables),
            _filled(self._logits, rows or [0]),
        )


def _filled(buffer: NDArray[Int], values: list[int]) -> NDArray[Int]:
    """The buffer's beginning with `values` in it."""
    part = buffer[: len(values)]
    part[:] = values
    return part
