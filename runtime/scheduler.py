"""Continuous batching: which tokens of which sequences the next step reads.

The scheduler knows caches and token counts, nothing of text, sampling or the engine underneath.
Not thread-safe: the step loop owns it.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagelet.runtime.block_manager import BlockManager
from pagelet.runtime.prefix_cache import Prefix
from pagelet.runtime.sequence_cache import SequenceCache
from pagelet.runtime.speculation.proposal import Proposal


class Sequence:
    """One row of tokens in the cache: `cache.length` of its `tokens` are there, the rest is to be read.

    Attributes:
        tokens: prompt and generated token ids. The step loop appends; nothing else changes it.
        proposal: candidates that the next step verifies behind `tokens`, as far as there is room.
        cache: the blocks of its tokens.
        rank: sort key, lower is served first: (-priority, arrival number).
        origin: a sequence with the same first tokens, whose blocks it begins with; only until it starts.
        cached_tokens: tokens that were in the cache when it first started; None before.
        scheduled: whether it waits or runs.
        max_chunk: most tokens that one step reads of it; None: only the step's budget limits it.
    """

    max_chunk: int | None = None
    proposal: Proposal = ()

    def __init__(
        self,
        tokens: list[int],
        cache: SequenceCache,
        rank: tuple[int, int],
        origin: "Sequence | None" = None,
    ) -> None:
        self.tokens = tokens
        self.cache = cache
        self.rank = rank
        self.origin = origin
        self.cached_tokens: int | None = None
        self.scheduled = False

    @property
    def logits_from(self) -> int:
        """First position whose logits are wanted."""
        return len(self.tokens) - 1

    @property
    def num_unread(self) -> int:
        return len(self.tokens) - self.cache.length


S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True)
class Run(Generic[S]):
    """A sequence's part of a step: `count` tokens behind `past`, the last `num_drafted` of them candidates.

    Logits are wanted for the last `num_logits`.
    """

    sequence: S
    past: int
    count: int
    num_logits: int
    num_drafted: int = 0

    @property
    def reads_prompt(self) -> bool:
        return self.count - self.num_drafted > 1


class Scheduler(Generic[S]):
    """First come, first served, under a budget of tokens per step.

    Sequences that generate come before prompts, so a long prompt never stalls them. When the pool runs
    out of blocks, the sequence served last gives all of its blocks back, waits at its old place in the
    queue, and is read again later, from the cache as far as its blocks are still there. A sequence must fit
    into the pool alone; then the first in rank always advances, and with it everything does.

    Attributes:
        num_preempted: how often a sequence gave its blocks back.
        num_looked_up, num_found: tokens of the sequences that started, and those in the cache by then.
        waiting, running: sequences, both sorted by rank.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_sequences: int,
        max_step_tokens: int,
        on_leave: Callable[[S], None] = lambda sequence: None,
    ) -> None:
        """`on_leave` is told of every sequence that gave its blocks back, for good or for now."""
        self.blocks = blocks
        self._on_leave = on_leave
        self.num_preempted = 0
        self.num_looked_up = 0
        self.num_found = 0
        self._max_sequences = max_sequences
        self._max_step_tokens = max_step_tokens
        self.waiting: list[S] = []
        self.running: list[S] = []
        # The first that waits, and the available blocks when they were too few for it.
        self._blocked: tuple[S, list[int]] | None = None

    def add(self, sequence: S) -> None:
        sequence.scheduled = True
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: S) -> None:
        """Forget a sequence, wherever it is, and free its blocks."""
        # It leaves its queue last: if this fails, whoever ends everything still finds it there.
        sequence.cache.free()
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        sequence.scheduled = False
        sequence.origin = None
        self._blocked = None
        self._on_leave(sequence)

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
            budget -= self._admit(plan, budget)
        self._add_candidates(plan, preempted, budget)
        self.blocks.note_peak()
        return [_run(sequence, count) for sequence, count in plan.items() if sequence not in preempted]

    def _reserve(self, sequence: S, count: int, preempted: set[S]) -> bool:
        """Take blocks for `count` tokens, from the sequences served last if need be; False if it is one."""
        while not sequence.cache.append(count):
            victim = self.running[-1]
            victim.cache.free()
            self.running.pop()
            victim.proposal = ()
            self.add(victim)
            preempted.add(victim)
            self.num_preempted += 1
            self._on_leave(victim)
            if victim is sequence:
                return False
        return True

    def _add_candidates(self, plan: dict[S, int], preempted: set[S], budget: int) -> None:
        """Read proposals where blocks and budget are left: no sequence, a waiting one neither, loses any to a
        guess."""
        for sequence, count in plan.items():
            wanted = sequence.proposal[:budget]
            may_guess = sequence not in preempted and not sequence.num_unread
            if not (wanted and may_guess and sequence.cache.append(len(wanted))):
                wanted = ()
            sequence.proposal = wanted
            plan[sequence] = count + len(wanted)
            budget -= len(wanted)

    def _admit(self, plan: dict[S, int], budget: int) -> int:
        """Start waiting sequences while their whole prompt fits beside what the running ones still read.

        Returns how many tokens the step reads of them.
        """
        if not self.waiting or self._is_still_blocked():
            return 0
        given = budget
        promised = self._promised()
        index = 0
        while index < len(self.waiting) and budget and len(self.running) < self._max_sequences:
            sequence = self.waiting[index]
            if _waits_for_origin(sequence):
                index += 1
                continue
            prefix = _prefix(sequence)
            demand = self.blocks.demand_after(prefix, len(sequence.tokens))
            # One block each to grow into, lest a newcomer is preempted at once.
            wanted = [
                mine + others + len(self.running) for mine, others in zip(demand, promised, strict=True)
            ]
            if self.running and not self.blocks.has_room(wanted):
                self._blocked = (sequence, self.blocks.room) if not index else None
                break
            count = self._start(sequence, prefix, budget)
            del self.waiting[index]
            promised = self._promised()
            plan[sequence] = count
            budget -= count
        return given - budget

    def _is_still_blocked(self) -> bool:
        """Whether the first that waits had no room, and none has come since.

        To look again would search for its prefix, with a full pool in every step.
        """
        if self._blocked is None or self._blocked[0] is not self.waiting[0]:
            return False
        return all(now <= then for now, then in zip(self.blocks.room, self._blocked[1], strict=True))

    def _promised(self) -> list[int]:
        """Blocks of each group that the running sequences take for what they still read."""
        demands = [self.blocks.demand(sequence.cache, len(sequence.tokens)) for sequence in self.running]
        return [sum(column) for column in zip(*demands, strict=True)] or [0] * len(self.blocks.pools)

    def _start(self, sequence: S, prefix: Prefix, budget: int) -> int:
        """Begin with `prefix`; returns how many tokens the step reads."""
        sequence.cache.adopt(prefix)
        sequence.origin = None
        if sequence.cached_tokens is None:
            sequence.cached_tokens = prefix.length
            if sequence.cache.keys is not None:
                self.num_looked_up += len(sequence.tokens)
                self.num_found += prefix.length
        count = min(sequence.num_unread, budget, sequence.max_chunk or budget)
        fits = sequence.cache.append(count)
        assert fits, "a sequence that does not fit into the empty pool was let in"
        insort(self.running, sequence, key=_rank)
        return count


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _reads_prompt(sequence: Sequence) -> bool:
    return sequence.num_unread > 1


def _waits_for_origin(sequence: Sequence) -> bool:
    """Whether the sequence that it shares its beginning with is served before it, and still reads that."""
    origin = sequence.origin
    if origin is None or not origin.scheduled or origin.rank > sequence.rank:
        return False
    return origin.cache.committed < len(sequence.tokens) - 1


def _prefix(sequence: Sequence) -> Prefix:
    """What it can take over: all but the last token from its origin, or what the prefix cache has."""
    if sequence.origin is not None and sequence.origin.scheduled:
        shared = sequence.origin.cache.shared_prefix(len(sequence.tokens) - 1)
        if shared is not None:
            return shared
    return sequence.cache.cached_prefix(sequence.tokens)


def _run(sequence: S, count: int) -> Run[S]:
    end = sequence.cache.length
    num_logits = max(0, min(count, end - sequence.logits_from))
    return Run(sequence, end - count, count, num_logits, len(sequence.proposal))
