"""Continuous batching: which tokens of which sequences the next step reads.

The scheduler knows block tables and token counts, nothing of text, sampling or the engine underneath.
Not thread-safe: the step loop owns it.
"""

from bisect import insort
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagelet.runtime.block_pool import BlockPool, BlockTable


class Sequence:
    """One row of tokens in the cache: `table.length` of its `tokens` are there, the rest is to be read.

    Attributes:
        tokens: prompt and generated token ids. The step loop appends; nothing else changes it.
        table: the blocks of its tokens.
        logits_from: first position whose logits are wanted.
        rank: sort key, lower is served first: (-priority, arrival number).
        max_chunk: most tokens that one step reads of it; None: only the step's budget limits it.
    """

    max_chunk: int | None = None

    def __init__(self, tokens: list[int], table: BlockTable, rank: tuple[int, int]) -> None:
        self.tokens = tokens
        self.table = table
        self.rank = rank

    @property
    def logits_from(self) -> int:
        return len(self.tokens) - 1

    @property
    def num_unread(self) -> int:
        return len(self.tokens) - self.table.length


S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True)
class Run(Generic[S]):
    """A sequence's part of a step: tokens `past` to `past + count`, logits for the last `num_logits`."""

    sequence: S
    past: int
    count: int
    num_logits: int


class Scheduler(Generic[S]):
    """First come, first served, under a budget of tokens per step.

    Sequences that generate come before prompts, so a long prompt never stalls them. When the pool runs
    out of blocks, the sequence served last gives all of its blocks back, waits at its old place in the
    queue, and is read again later. A sequence must fit into the pool alone; then the first in rank
    always advances, and with it everything does.
    """

    def __init__(self, pool: BlockPool, *, max_sequences: int, max_step_tokens: int) -> None:
        self.pool = pool
        self.num_preempted = 0
        self._max_sequences = max_sequences
        self._max_step_tokens = max_step_tokens
        # Both sorted by rank.
        self.waiting: list[S] = []
        self.running: list[S] = []

    def add(self, sequence: S) -> None:
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: S) -> None:
        """Forget a sequence, wherever it is, and free its blocks."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        sequence.table.free()

    def clear(self) -> None:
        """Forget every sequence and free its blocks."""
        for sequence in [*self.running, *self.waiting]:
            self.remove(sequence)

    def schedule(self) -> list[Run[S]]:
        """Decide the next step and reserve its blocks; empty only when nothing waits and nothing runs."""
        plan: dict[S, int] = {}
        preempted: set[S] = set()
        budget = self._max_step_tokens
        # A stable sort: those with one unread token generate, the others still read their prompt.
        for sequence in sorted(self.running, key=_reads_prompt):
            count = min(sequence.num_unread, budget, sequence.max_chunk or budget)
            if count and sequence not in preempted and self._reserve(sequence, count, preempted):
                plan[sequence] = count
                budget -= count
        if not preempted:
            self._admit(plan, budget)
        return [_run(sequence, count) for sequence, count in plan.items() if sequence not in preempted]

    def _reserve(self, sequence: S, count: int, preempted: set[S]) -> bool:
        """Take blocks for `count` tokens, from the sequences served last if need be; False if it is one."""
        while not sequence.table.append(count):
            victim = self.running.pop()
            victim.table.free()
            self.add(victim)
            preempted.add(victim)
            self.num_preempted += 1
            if victim is sequence:
                return False
        return True

    def _admit(self, plan: dict[S, int], budget: int) -> None:
        """Start waiting sequences while their whole prompt fits beside what the running ones still read."""
        promised = sum(_missing_blocks(sequence) for sequence in self.running)
        while self.waiting and budget and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            # One block each to grow into, lest a newcomer is preempted at once.
            wanted = promised + _missing_blocks(sequence) + len(self.running)
            if self.running and wanted > self.pool.num_free:
                break
            count = min(sequence.num_unread, budget, sequence.max_chunk or budget)
            fits = sequence.table.append(count)
            assert fits, "a sequence that does not fit into the empty pool was let in"
            insort(self.running, self.waiting.pop(0), key=_rank)
            promised += _missing_blocks(sequence)
            plan[sequence] = count
            budget -= count


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _reads_prompt(sequence: Sequence) -> bool:
    return sequence.num_unread > 1


def _missing_blocks(sequence: Sequence) -> int:
    return sequence.table.missing_blocks(sequence.num_unread)


def _run(sequence: S, count: int) -> Run[S]:
    end = sequence.table.length
    num_logits = max(0, min(count, end - sequence.logits_from))
    return Run(sequence, end - count, count, num_logits)
