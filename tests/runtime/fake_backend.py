"""A backend without a model: logits are a fixed function of the tokens read back through the block tables.

A wrong block, slot, position or length changes the hash of a sequence's history, and so its tokens.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import BackendError
from pagelet.runtime import Completion, Engine, SamplingParams
from pagelet.runtime.backends import StepBatch
from pagelet.runtime.cache_layout import CacheLayout, GroupLayout

_RNG = np.random.default_rng(5)
_POSITION_WEIGHTS = _RNG.integers(1, 2**63, 1 << 16, dtype=np.uint64)


def logits_of(
    history: NDArray[np.int64], vocab_size: int, windows: tuple[int, ...] = (0,)
) -> NDArray[np.float32]:
    """Logits float32 [T, vocab] after each token of `history`: a hash of it and all before it, plus a hash
    of its last W tokens for each window W that is not 0."""
    terms = _POSITION_WEIGHTS[: len(history)] * (history.astype(np.uint64) + np.uint64(1))
    return _logits(sum((windowed_sums(terms, window) for window in windows), np.uint64(0)), vocab_size)


def windowed_sums(terms: NDArray[np.uint64], window: int) -> NDArray[np.uint64]:
    """uint64 [T]: the sum of the last `window` terms at each place; of all where it is 0."""
    sums = np.cumsum(terms)
    if window:
        sums[window:] -= sums[:-window].copy()
    return sums


def _logits(hashes: NDArray[np.uint64], vocab_size: int) -> NDArray[np.float32]:
    mixed = hashes[:, None] + np.arange(vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 21)


def greedy(prompt: list[int], num_tokens: int, vocab_size: int, windows: tuple[int, ...] = (0,)) -> list[int]:
    """What greedy generation gives, without any cache: the oracle."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_of(np.array(tokens), vocab_size, windows)[-1].argmax()))
    return tokens[len(prompt) :]


class FakeBackend:
    """Checks each batch against the contract and keeps the history of each sequence in its blocks.

    `windows` are those of its groups of layers; each has `num_blocks` blocks, or as many as `group_blocks`
    says.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 320,
        max_context: int = 128,
        before_run: Callable[[StepBatch], None] = lambda batch: None,
        script: list[int] | None = None,
        windows: tuple[int, ...] = (0,),
        group_blocks: tuple[int, ...] | None = None,
        max_step_tokens: int = 512,
    ) -> None:
        counts = group_blocks or (num_blocks,) * len(windows)
        groups = zip(windows, counts, strict=True)
        self.layout = CacheLayout(
            block_size,
            tuple(GroupLayout(window, count, block_bytes=block_size * 8) for window, count in groups),
            max_step_tokens,
        )
        self.fingerprint = "fake"
        self.cache_type = "f32"
        self.row_noise = 0.0
        self.supports_trees = False
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.before_run = before_run
        self.script = script  # the token of each position, prompt included, that shall be the likeliest
        # Tokens of each sequence, of the latest steps.
        self.batches: deque[tuple[int, ...]] = deque(maxlen=200)
        self.closed = False
        self.copies = 0
        self._caches = [np.full((count, block_size), -(10**9), np.int64) for count in counts]
        self._busy = threading.Lock()

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        assert self._busy.acquire(blocking=False), "two steps at once"
        try:
            assert not self.closed
            self.before_run(batch)
            return self._run(batch)
        finally:
            self._busy.release()

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._caches[group][target] = self._caches[group][source]
        self.copies += len(pairs)

    def copy_slots(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        slots = self._caches[group].reshape(-1)
        for source, target in pairs:
            slots[target] = slots[source]

    def read_blocks(self, group: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self._caches[group][list(blocks)].view(np.uint8)

    def write_blocks(self, group: int, blocks: Sequence[int], rows: Sequence[NDArray[np.uint8]]) -> None:
        for block, row in zip(blocks, rows, strict=True):
            self._caches[group][block] = np.frombuffer(row, np.int64)

    def close(self) -> None:
        self.closed = True

    def _run(self, batch: StepBatch) -> NDArray[np.float32]:
        offsets = batch.cumulative_sequence_length
        num_tokens, num_sequences = len(batch.input_ids), len(batch.past_seqlens)
        assert batch.input_ids.dtype == batch.position_ids.dtype == batch.logits_indices.dtype == np.int64
        assert offsets.dtype == batch.past_seqlens.dtype == np.int32
        assert offsets[0] == 0
        assert offsets[-1] == num_tokens
        assert len(offsets) == num_sequences + 1
        assert (np.diff(batch.logits_indices) > 0).all()
        assert len(batch.logits_indices) >= 1
        assert len(batch.block_tables) == len(self._caches)
        self.batches.append(tuple(np.diff(offsets).tolist()))
        hashes = np.zeros(num_tokens, np.uint64)
        for index in range(num_sequences):
            rows = slice(offsets[index], offsets[index + 1])
            past = int(batch.past_seqlens[index])
            assert rows.stop > rows.start
            assert (batch.position_ids[rows] == np.arange(past, past + rows.stop - rows.start)).all()
            for group, tables in enumerate(batch.block_tables):
                assert tables.dtype == np.int32
                assert len(tables) == num_sequences
                hashes[rows] += self._attend(group, tables[index], past, batch.input_ids[rows])
        logits = _logits(hashes, self.vocab_size)
        if self.script is not None:
            for row in batch.logits_indices:
                logits[row, self.script[batch.position_ids[row] + 1]] = 1e4
        return logits[batch.logits_indices]

    def _attend(
        self, group: int, table: NDArray[np.int32], past: int, tokens: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Write the tokens' slots, then hash what each row's window holds."""
        cache, window, size = self._caches[group], self.layout.groups[group].window, self.layout.block_size
        end = past + len(tokens)
        positions = np.arange(max(0, past - window + 1) if window else 0, end)
        blocks = table[positions // size]
        assert (blocks >= 0).all(), "a block that is needed is not mapped"
        cache[blocks[len(blocks) - len(tokens) :], positions[-len(tokens) :] % size] = tokens
        read = cache[blocks, positions % size].astype(np.uint64) + np.uint64(1)
        return windowed_sums(_POSITION_WEIGHTS[positions] * read, window)[-len(tokens) :]


def failing_once(message: str) -> Callable[[StepBatch], None]:
    """A `before_run` whose first call raises."""
    failures = [BackendError(message)]

    def before_run(batch: StepBatch) -> None:
        if failures:
            raise failures.pop()

    return before_run


def generate_together(
    engine: Engine, prompts: Iterable[list[int]], params: SamplingParams
) -> list[Completion]:
    """As `generate_all`, but all arrive between two steps: what waits does not depend on the machine."""
    requests = engine._loop.call(lambda: [engine.submit(prompt, params) for prompt in prompts])
    return [request.result(timeout=60) for request in requests]
