"""StepBuffers: the arrays of a step's inputs, allocated once and filled anew in each step."""

import numpy as np

from pagelet.runtime.backends.base import Int32Array, Int64Array, StepBatch
from pagelet.runtime.scheduler import Run, S


class StepBuffers:
    """Holds a StepBatch of up to `max_tokens` tokens of up to `max_sequences` sequences."""

    def __init__(
        self, *, max_tokens: int, max_sequences: int, max_blocks: int, num_groups: int, max_context: int
    ) -> None:
        self._input_ids: Int64Array = np.zeros(max_tokens, np.int64)
        self._position_ids: Int64Array = np.zeros(max_tokens, np.int64)
        self._offsets: Int32Array = np.zeros(max_sequences + 1, np.int32)
        self._past: Int32Array = np.zeros(max_sequences, np.int32)
        self._tables: list[Int32Array] = [
            np.zeros((max_sequences, max_blocks), np.int32) for _ in range(num_groups)
        ]
        self._logits: Int64Array = np.zeros(max_tokens, np.int64)
        self._positions: Int64Array = np.arange(max_context, dtype=np.int64)

    def fill(self, runs: list[Run[S]]) -> StepBatch:
        """Views of the buffers, valid until the next call; row r of the logits belongs to the runs in order.

        Where no run wants logits the batch asks for one row, since R is at least 1.
        """
        start, rows = 0, 0
        for index, run in enumerate(runs):
            end = start + run.count
            last = run.past + run.count
            self._input_ids[start:end] = run.sequence.tokens[run.past : last]
            self._position_ids[start:end] = self._positions[run.past : last]
            self._offsets[index + 1] = end
            self._past[index] = run.past
            # 4 bytes per block: a copy of the row is cheaper than to track what changed in it.
            for rows_of_group, table in zip(self._tables, run.sequence.cache.tables, strict=True):
                rows_of_group[index] = table.blocks
            for row in range(end - run.num_logits, end):
                self._logits[rows] = row
                rows += 1
            start = end
        if not rows:
            self._logits[0] = 0
        return StepBatch(
            self._input_ids[:start],
            self._position_ids[:start],
            self._offsets[: len(runs) + 1],
            self._past[: len(runs)],
            tuple(table[: len(runs)] for table in self._tables),
            self._logits[: max(rows, 1)],
        )
