"""Trial steps: how long a backend's steps take, before there is anything to generate."""

import time

import numpy as np

from pagelet.runtime.backends.base import Backend, StepBatch
from pagelet.runtime.speculation.costs import StepCosts

# Tokens before the rows of a trial, and the rows that are tried: more than pay beside a draft.
_PAST = 256
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
_REPEATS = 3


def measure(backend: Backend, costs: StepCosts, max_rows: int) -> None:
    """Fill `costs` from steps of one sequence. Writes into any blocks, so nothing may be in the cache yet."""
    for rows in _ROWS:
        if rows <= max_rows and (batch := _batch(backend, rows)):
            backend.run(batch)
            for _ in range(_REPEATS):
                started = time.perf_counter()
                backend.run(batch)
                costs.count(rows, time.perf_counter() - started)


def _batch(backend: Backend, rows: int) -> StepBatch | None:
    """One sequence of `rows` new tokens, as long as the cache allows; None where they do not fit at all."""
    layout = backend.layout
    room = min(backend.max_context, *(group.num_blocks * layout.block_size for group in layout.groups))
    past = min(_PAST, room - rows)
    if past < 0:
        return None
    num_blocks = -(-(past + rows) // layout.block_size)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    return StepBatch(
        np.zeros(rows, np.int64),
        np.arange(past, past + rows),
        np.array([0, rows], np.int32),
        np.array([past], np.int32),
        (table,) * len(layout.groups),
        np.arange(rows),
    )
