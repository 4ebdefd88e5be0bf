"""A backend without a model: logits are a fixed function of the tokens read back through the block tables.

A wrong block, slot, position or length changes the hash of a sequence's history, and so its tokens.
"""

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import BackendError
from pagelet.runtime.backends import CacheLayout, StepBatch

_RNG = np.random.default_rng(5)
_POSITION_WEIGHTS = _RNG.integers(1, 2**63, 1 << 16, dtype=np.uint64)


def logits_of(history: NDArray[np.int64], vocab_size: int) -> NDArray[np.float32]:
    """Logits float32 [T, vocab] after each token of `history`: a hash of the token and all before it."""
    hashes = np.cumsum(_POSITION_WEIGHTS[: len(history)] * (history.astype(np.uint64) + np.uint64(1)))
    mixed = hashes[:, None] + np.arange(vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 21)


def greedy(prompt: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What greedy generation gives, without any cache: the oracle."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_of(np.array(tokens), vocab_size)[-1].argmax()))
    return tokens[len(prompt) :]


class FakeBackend:
    """Checks each batch against the contract and keeps the history of each sequence in its blocks."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 320,
        max_context: int = 128,
        before_run: Callable[[StepBatch], None] = lambda batch: None,
        script: list[int] | None = None,
    ) -> None:
        self.layout = CacheLayout(num_blocks, block_size, block_bytes=block_size * 8)
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.before_run = before_run
        self.script = script  # the token of each position, prompt included, that shall be the likeliest
        # Tokens of each sequence, of the latest steps.
        self.batches: deque[tuple[int, ...]] = deque(maxlen=200)
        self.closed = False
        self._cache = np.full((num_blocks, block_size), -(10**9), np.int64)
        self._busy = threading.Lock()

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        assert self._busy.acquire(blocking=False), "two steps at once"
        try:
            assert not self.closed
            self.before_run(batch)
            return self._run(batch)
        finally:
            self._busy.release()

    def close(self) -> None:
        self.closed = True

    def _run(self, batch: StepBatch) -> NDArray[np.float32]:
        offsets = batch.cumulative_sequence_length
        (tables,) = batch.block_tables
        num_tokens, num_sequences = len(batch.input_ids), len(batch.past_seqlens)
        assert batch.input_ids.dtype == batch.position_ids.dtype == batch.logits_indices.dtype == np.int64
        assert offsets.dtype == batch.past_seqlens.dtype == tables.dtype == np.int32
        assert offsets[0] == 0
        assert offsets[-1] == num_tokens
        assert len(offsets) == len(tables) + 1 == num_sequences + 1
        assert (np.diff(batch.logits_indices) > 0).all()
        assert len(batch.logits_indices) >= 1
        self.batches.append(tuple(np.diff(offsets).tolist()))
        logits = np.zeros((num_tokens, self.vocab_size), np.float32)
        for index in range(num_sequences):
            rows = slice(offsets[index], offsets[index + 1])
            past = int(batch.past_seqlens[index])
            end = past + rows.stop - rows.start
            assert end > past
            assert (batch.position_ids[rows] == np.arange(past, end)).all()
            positions = np.arange(end)
            blocks = tables[index][positions // self.layout.block_size]
            assert (blocks >= 0).all(), "a block that is needed is not mapped"
            slots = positions % self.layout.block_size
            self._cache[blocks[past:], slots[past:]] = batch.input_ids[rows]
            logits[rows] = logits_of(self._cache[blocks, slots], self.vocab_size)[past:]
        if self.script is not None:
            for row in batch.logits_indices:
                logits[row, self.script[batch.position_ids[row] + 1]] = 1e4
        return logits[batch.logits_indices]


def failing_once(message: str) -> Callable[[StepBatch], None]:
    """A `before_run` whose first call raises."""
    failures = [BackendError(message)]

    def before_run(batch: StepBatch) -> None:
        if failures:
            raise failures.pop()

    return before_run
