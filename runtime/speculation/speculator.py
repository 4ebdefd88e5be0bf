"""Speculator: what each sequence's next step verifies, and what came of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pagelet.runtime.scheduler import Run
from pagelet.runtime.speculation.costs import StepCosts
from pagelet.runtime.speculation.guard import GuardedProposer
from pagelet.runtime.speculation.planner import likelihoods, plan
from pagelet.runtime.speculation.proposal import Proposal, TokenIndices
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.tasks import Generation, Task

# Candidates of one step; more rows of logits would not pay on any processor that a step is slow on.
MAX_ROWS = 64
# Times that proposers are asked in vain for a sequence before they are asked at every so many tokens only.
# To ask takes about 1% of a small model's step.
_PATIENCE = 8
_PAUSE = 4


@dataclass
class SpeculationCounters:
    """What speculation has done since the engine was opened.

    Attributes:
        drafted, accepted: candidates that were verified, and those that became text.
        sequence_steps, tokens: steps of each sequence that generated, and the tokens that they gave.
        reruns: rows that did not decide their token, which a step without candidates then did.
        seconds_saved: an estimate: plain steps for the same tokens, less the drafts and steps that ran.
    """

    drafted: int = 0
    accepted: int = 0
    sequence_steps: int = 0
    tokens: int = 0
    reruns: int = 0
    seconds_saved: float = 0.0


@dataclass(frozen=True)
class _Choice:
    """A sequence, and the proposer that has the best outlook for it."""

    sequence: Generation
    proposer: Proposer
    outlook: Proposal


class Speculator:
    """Asks the proposers, plans by cost, and tells them what was accepted. For the step thread alone."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        *,
        num_draft_tokens: int | None = None,
        max_draft_tokens: int,
        max_rows: int,
        vocab_size: int,
        trees: bool,
    ) -> None:
        """
        Args:
            proposers: one that fails is given up; the texts go on without it.
            num_draft_tokens: most candidates of each sequence, taken in every step; None: as many as are
                expected to pay.
            max_draft_tokens: most candidates of one sequence.
            max_rows: most candidates of a step.
            trees: whether the target verifies several candidates for one place.
        """
        self.counters = SpeculationCounters()
        self.costs = StepCosts()
        self._proposers = [GuardedProposer(proposer, vocab_size, trees=trees) for proposer in proposers]
        self._fixed = num_draft_tokens
        self._max_draft_tokens = max_draft_tokens if num_draft_tokens is None else num_draft_tokens
        self._max_rows = max_rows
        self._proposed: dict[Generation, Proposer] = {}
        self._in_vain: dict[Generation, int] = {}  # times asked since anything was accepted
        self._drafting_seconds = 0.0

    @property
    def failure(self) -> str | None:
        """Why proposers were given up; None while all work."""
        return "; ".join(proposer.failure for proposer in self._proposers if proposer.failure) or None

    def propose(self, tasks: Sequence[Task]) -> None:
        """Give the sequences that generate a proposal for the next step, where one is expected to pay."""
        self._proposed.clear()
        self._drafting_seconds = 0.0
        if not self._proposers:
            return
        started = time.perf_counter()
        generating = [task for task in tasks if isinstance(task, Generation) and task.num_unread == 1]
        asked = [task for task in generating if self._is_asked(task)]
        if asked:
            self._fill(*self._best_plan(asked, len(generating)))
            for task in asked:
                self._in_vain[task] = self._in_vain.get(task, 0) + 1
        self._drafting_seconds = time.perf_counter() - started

    def settle(self, run: Run[Task], accepted: TokenIndices) -> None:
        """A run is over: `accepted` of its candidates became text."""
        task = run.sequence
        if run.num_drafted and isinstance(task, Generation):
            self.counters.drafted += run.num_drafted
            self.counters.accepted += len(accepted)
            self.counters.reruns += task.undecided
            self._proposed[task].observe(task, task.proposal, accepted)
            if accepted:
                self._in_vain[task] = 0
        task.proposal = ()

    def count_step(self, runs: Sequence[Run[Task]], num_tokens: int, seconds: float) -> None:
        """A step that read no prompt gave `num_tokens` tokens after `seconds` in the backend."""
        rows = sum(run.count for run in runs)
        self.costs.count(rows, seconds)
        self.counters.sequence_steps += len(runs)
        self.counters.tokens += num_tokens
        if rows > len(runs):
            plain = self.costs.seconds(len(runs)) * num_tokens / len(runs)
            self.counters.seconds_saved += plain - seconds
        self.counters.seconds_saved -= self._drafting_seconds

    def forget(self, task: Task) -> None:
        """A sequence is over, or left the cache for now."""
        if isinstance(task, Generation):
            self._in_vain.pop(task, None)
            for proposer in self._proposers:
                proposer.forget(task)

    def check_integrity(self) -> None:
        """Assert that what the proposers hold is counted right."""
        for proposer in self._proposers:
            proposer.check_integrity()

    def close(self) -> None:
        for proposer in self._proposers:
            proposer.close()

    def _is_asked(self, task: Generation) -> bool:
        """At every token, but where nothing was accepted for long at some only."""
        is_patient = self._fixed is not None or self._in_vain.get(task, 0) < _PATIENCE
        return is_patient or len(task.tokens) % _PAUSE == 0

    def _best_plan(self, asked: list[Generation], num_sequences: int) -> tuple[list[_Choice], list[int]]:
        """Free proposers alone, or all of them: whichever gives more tokens per second."""
        free = [proposer for proposer in self._proposers if not proposer.seconds([1])]
        choices, lengths, rate = self._plan(asked, free, num_sequences)
        if len(free) < len(self._proposers):
            more, their_lengths, their_rate = self._plan(asked, self._proposers, num_sequences)
            if their_rate > rate or self._fixed is not None:
                return more, their_lengths
        return choices, lengths

    def _plan(
        self, asked: list[Generation], proposers: Sequence[Proposer], num_sequences: int
    ) -> tuple[list[_Choice], list[int], float]:
        choices = [choice for task in asked if (choice := self._choose(task, proposers))]
        if not choices:
            return [], [], num_sequences / self.costs.seconds(num_sequences)
        if self._fixed is not None:
            return choices, [len(choice.outlook) for choice in choices], 0.0

        paid = [proposer for proposer in proposers if proposer.seconds([1])]

        def seconds(lengths: Sequence[int]) -> float:
            total = self.costs.seconds(num_sequences + sum(lengths))
            for proposer in paid:
                mine = [
                    length
                    for choice, length in zip(choices, lengths, strict=True)
                    if choice.proposer is proposer and length
                ]
                total += proposer.seconds(mine) if mine else 0.0
            return total

        outlooks = [choice.outlook for choice in choices]
        return choices, *plan(outlooks, num_sequences, seconds, self._max_rows)

    def _choose(self, task: Generation, proposers: Sequence[Proposer]) -> _Choice | None:
        """The outlook with the most tokens to expect."""
        limit = min(self._max_draft_tokens, task.max_candidates)
        if not limit or not proposers:
            return None
        choices = [_Choice(task, proposer, proposer.outlook(task, limit)) for proposer in proposers]
        best = choices[0]
        if len(choices) > 1:
            best = max(choices, key=lambda choice: sum(likelihoods(choice.outlook)))
        return best if best.outlook else None

    def _fill(self, choices: list[_Choice], lengths: list[int]) -> None:
        """Let the chosen proposers guess."""
        room = self._max_rows
        for proposer in self._proposers:
            wanted = []
            for choice, length in zip(choices, lengths, strict=True):
                if choice.proposer is proposer and min(length, room):
                    wanted.append((choice.sequence, choice.outlook[: min(length, room)]))
                    room -= len(wanted[-1][1])
            filled = proposer.fill(wanted) if wanted else []
            for (sequence, _), proposal in zip(wanted, filled, strict=True):
                sequence.proposal = proposal
                self._proposed[sequence] = proposer
