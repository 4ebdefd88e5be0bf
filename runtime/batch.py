"""StepBuffers: the arrays of a step's inputs, allocated once and filled anew in each step."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagelet.runtime.backends.base import Int32Array, Int64Array, StepBatch
from pagelet.runtime.scheduler import Run, S
from pagelet.runtime.speculation.proposal import depths, is_chain

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
        has_tree = False
        for index, run in enumerate(runs):
            last = run.past + run.count - run.num_drafted
            tokens += run.sequence.tokens[run.past : last]
            positions += range(run.past, last)
            if proposal := run.sequence.proposal:
                tokens += [candidate.token for candidate in proposal]
                positions += [last + depth for depth in depths(proposal)]
                has_tree = has_tree or not is_chain(proposal)
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
            _ancestor_mask(runs) if has_tree else None,
        )


def _ancestor_mask(runs: list[Run[S]]) -> Int32Array:
    """int32 [T, W]: the rows of its own sequence that each row descends from; see StepBatch."""
    num_words = -(-max(run.count for run in runs) // 32)
    masks: list[int] = []
    for run in runs:
        first = run.count - run.num_drafted
        mine = [(1 << row) - 1 for row in range(first + 1)]  # the last one: of what follows the last token
        after_last = mine.pop()
        for candidate in run.sequence.proposal:
            parent = first + candidate.parent
            mine.append(mine[parent] | 1 << parent if candidate.parent >= 0 else after_last)
        masks += mine
    words = b"".join(mask.to_bytes(4 * num_words, "little") for mask in masks)
    return np.frombuffer(words, "<i4").reshape(len(masks), num_words).astype(np.int32, copy=False)


def _filled(buffer: NDArray[Int], values: list[int]) -> NDArray[Int]:
    """The buffer's beginning with `values` in it."""
    part = buffer[: len(values)]
    part[:] = values
    return part
