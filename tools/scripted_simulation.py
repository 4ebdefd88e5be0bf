"""A draft that gets each token right with a fixed probability, and the simulation of what it gains."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pagelet.runtime.sampling.noise import row_key
from pagelet.runtime.speculation.chain_outlook import ChainOutlook, shared_acceptance
from pagelet.runtime.speculation.costs import StepCosts
from pagelet.runtime.speculation.planner import plan
from pagelet.runtime.speculation.proposal import Proposal
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.speculation.speculator import MAX_ROWS
from pagelet.runtime.tasks import Generation

_MAX_FIXED = 8  # most candidates per sequence that the formula is tried with
_MIN_SAMPLES = 5  # steps of so many rows that make a median; with fewer, the cost model's own estimate counts


class Script:
    """Which guesses of the draft are right, and what it has learned of that; the same every time it is made.

    Attributes:
        round: a part of the coin's seed: each round has other right and wrong guesses.
    """

    def __init__(self, agreement: float) -> None:
        self.round = 0
        self._agreement = agreement
        self._acceptance = shared_acceptance()

    def agrees(self, prompt: int, position: int) -> bool:
        """Whether the guess for the new token `position` of a prompt is right."""
        return row_key(self.round, prompt, position) < self._agreement * 2.0**64

    def new_outlook(self) -> ChainOutlook:
        """Of one sequence: how a draft estimates its acceptance is part of what is measured."""
        return ChainOutlook(self._acceptance)


class ScriptedDraft(Proposer):
    """Guesses as its script says, and takes as long as a draft would.

    Attributes:
        texts: the greedy continuation of each prompt, by the prompt's tokens.
    """

    name = "scripted"

    def __init__(self, script: Script, vocab_size: int) -> None:
        self.script = script
        self.texts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.step_seconds = 0.0
        self._vocab_size = vocab_size
        self._outlooks: dict[Generation, ChainOutlook] = {}

    def outlook(self, sequence: Generation, limit: int) -> Proposal:
        if sequence not in self._outlooks:
            self._outlooks[sequence] = self.script.new_outlook()
        return self._outlooks[sequence].candidates(len(sequence.tokens), limit)

    def seconds(self, lengths: Sequence[int]) -> float:
        return self.step_seconds * max(lengths)

    def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        """One step of the draft serves all sequences; it keeps a core busy, as a draft's would."""
        end = time.perf_counter() + self.seconds([len(proposal) for _, proposal in proposals])
        filled = [self._guess(sequence, proposal) for sequence, proposal in proposals]
        while time.perf_counter() < end:
            pass
        return filled

    def _guess(self, sequence: Generation, proposal: Proposal) -> Proposal:
        start = sequence.request.prompt_tokens
        prompt = tuple(sequence.tokens[:start])
        text, which = self.texts[prompt], list(self.texts).index(prompt)
        known = len(sequence.tokens) - start
        guessed = []
        for position, candidate in enumerate(proposal, known):
            wrong = int(not self.script.agrees(which, position))
            guessed.append(candidate._replace(token_id=(text[position] + wrong) % self._vocab_size))
        return guessed

    def observe(self, sequence: Generation, proposal: Proposal, accepted: Sequence[int]) -> None:
        self._outlooks[sequence].observe(len(accepted), len(accepted) < len(proposal))

    def forget(self, sequence: Generation) -> None:
        self._outlooks.pop(sequence, None)


class TimedCosts(StepCosts):
    """The cost model, and the times that it was told."""

    def __init__(self) -> None:
        super().__init__()
        self._times: dict[int, list[float]] = defaultdict(list)

    def count(self, rows: int, seconds: float) -> None:
        super().count(rows, seconds)
        self._times[rows].append(seconds)

    def clear_times(self) -> None:
        self._times.clear()

    def median(self, rows: int) -> float:
        """Seconds of a step of so many rows since `clear_times`; where few ran, what the model estimates."""
        times = self._times.get(rows, ())
        return statistics.median(times) if len(times) >= _MIN_SAMPLES else self.seconds(rows)


@dataclass(frozen=True)
class Run:
    """All sequences together, from the prompts' step on: seconds, new tokens, and what was guessed."""

    seconds: float
    tokens: int
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def steps(self) -> int:
        """Of each sequence, added up."""
        return self.tokens - self.accepted


def simulate(
    script: Script,
    prompts: Iterable[int],
    new_tokens: int,
    step: Callable[[int], float],
    draft_seconds: float,
    max_draft_tokens: int,
) -> Run:
    """What a speculating run comes to if a step of n rows takes `step(n)` and the draft `draft_seconds`.

    Each sequence has `new_tokens` to come. That sequences without luck are asked less often is left out.
    """
    left = dict.fromkeys(prompts, new_tokens)
    chains = {prompt: script.new_outlook() for prompt in left}
    total = Run(0.0, new_tokens * len(left))
    while left:
        outlooks = [
            chains[prompt].candidates(new_tokens - more, min(max_draft_tokens, more - 1))
            for prompt, more in left.items()
        ]

        def seconds(lengths: Sequence[int], sequences: int = len(left)) -> float:
            return step(sequences + sum(lengths)) + draft_seconds * max(lengths)

        lengths, _ = plan(outlooks, len(left), seconds, MAX_ROWS)
        accepted = 0
        for prompt, length in zip(list(left), lengths, strict=True):
            # The prompt's step gave token 0.
            first = 1 + new_tokens - left[prompt]
            right = _leading(script.agrees(prompt, first + index) for index in range(length))
            if length:
                chains[prompt].observe(right, right < length)
            accepted += right
            left[prompt] -= right + 1
        total = Run(
            total.seconds + seconds(lengths),
            total.tokens,
            total.drafted + sum(lengths),
            total.accepted + accepted,
        )
        left = {prompt: count for prompt, count in left.items() if count}
    return total


def _leading(values: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    count = 0
    for value in values:
        if not value:
            break
        count += 1
    return count


def expected_ratio(
    agreement: float, length: int, sequences: int, step: Callable[[int], float], draft_seconds: float
) -> float:
    """Gain of `length` candidates for each sequence in each step (Leviathan et al. 2023, theorem 3.8)."""
    tokens = sum(agreement**accepted for accepted in range(length + 1))
    return tokens * step(sequences) / (step(sequences * (1 + length)) + length * draft_seconds)


def best_fixed(
    agreement: float, sequences: int, step: Callable[[int], float], draft_seconds: float
) -> tuple[float, int]:
    """The highest gain of 0 to 8 candidates, and how many these are."""
    lengths = range(_MAX_FIXED + 1)
    gains = [expected_ratio(agreement, length, sequences, step, draft_seconds) for length in lengths]
    return max(gains), gains.index(max(gains))
