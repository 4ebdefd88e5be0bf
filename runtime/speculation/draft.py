"""A second, smaller model that writes ahead: it draws what it takes for the target's next tokens."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagelet.runtime.backends.base import Backend, Float32Array
from pagelet.runtime.batch import StepBuffers
from pagelet.runtime.block_manager import BlockManager
from pagelet.runtime.scheduler import Run
from pagelet.runtime.scheduler import Sequence as CachedSequence
from pagelet.runtime.speculation.chain_outlook import ChainOutlook, shared_acceptance
from pagelet.runtime.speculation.costs import StepCosts
from pagelet.runtime.speculation.proposal import Proposal
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.speculation.trials import measure
from pagelet.runtime.tasks import Generation

# A step's tokens to catch up with a prompt, so that a long one never stalls the sequences beside it for long.
_CATCH_UP_TOKENS = 64
# So many tokens to catch up with are repaid by each one to come, at most: a draft reads a prompt many times
# as fast as it guesses.
_REPAID = 4


class _Writer(CachedSequence):
    """The draft's view of one sequence: the target's tokens, then its own guesses.

    Attributes:
        settled: how many of `tokens` are known to be the target's.
    """

    def __init__(self, blocks: BlockManager, sequence: Generation) -> None:
        options = sequence.request.options
        cache = blocks.new_cache(salt=options.cache_salt, prefix_cache=options.prefix_cache)
        super().__init__(list(sequence.tokens), cache, rank=(0, 0))
        cache.adopt(cache.cached_prefix(self.tokens))
        self.settled = len(self.tokens)

    def catch_up(self, tokens: list[int]) -> None:
        """Take over the target's tokens and give up what was guessed wrongly."""
        same = self.settled
        while same < min(len(tokens), len(self.tokens)) and tokens[same] == self.tokens[same]:
            same += 1
        self.tokens[same:] = tokens[same:]
        self.cache.truncate(min(self.cache.length, same))
        self.cache.commit(self.tokens)
        self.settled = len(tokens)


@dataclass
class _Guess:
    """What one sequence's proposal has so far."""

    sequence: Generation
    outlook: Proposal
    writer: _Writer
    tokens: list[int] = field(default_factory=list)

    @property
    def proposal(self) -> Proposal:
        known = zip(self.outlook, self.tokens, strict=False)
        return [candidate._replace(token_id=token_id) for candidate, token_id in known]

    def extend(self, logits: Float32Array) -> bool:
        """Draw a token from the draft's logits; False when that was the last one wanted."""
        token_id = self.sequence.guess(logits, self.tokens)
        if token_id is None:
            return False
        self.tokens.append(token_id)
        self.writer.tokens.append(token_id)
        return len(self.tokens) < len(self.outlook)


class DraftProposer(Proposer):
    """Runs the draft over a cache of its own, batched over the sequences as the target is.

    It draws with the target's parameters and noise, so at temperatures above 0 both tend to draw the same.
    Where its blocks do not suffice a sequence goes without proposals until there is room again.
    """

    name = "draft"

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int,
        context: int,
        max_sequences: int,
        max_step_tokens: int,
        prefix_cache: bool,
    ) -> None:
        """`backend` belongs to the proposer; `vocab_size` and `context` are the target's."""
        self.backend = backend
        self.costs = StepCosts()
        self.blocks = BlockManager(
            backend.layout, context, fingerprint=backend.fingerprint, prefix_cache=prefix_cache
        )
        self._vocab_size = vocab_size
        self._max_step_tokens = min(max_step_tokens, backend.layout.max_step_tokens)
        self._buffers = StepBuffers(
            max_tokens=self._max_step_tokens,
            max_sequences=max_sequences,
            max_blocks=self.blocks.max_blocks,
            num_groups=len(backend.layout.groups),
        )
        self._acceptance = shared_acceptance()
        self._outlooks: dict[Generation, ChainOutlook] = {}
        self._writers: dict[Generation, _Writer] = {}

    def measure(self) -> None:
        """Learn what a step costs, while there is nothing in the cache."""
        measure(self.backend, self.costs, max_rows=1)

    def outlook(self, sequence: Generation, limit: int) -> Proposal:
        writer = self._writers.get(sequence)
        behind = len(sequence.tokens) - (0 if writer is None else writer.cache.length)
        if behind > max(_CATCH_UP_TOKENS, _REPAID * sequence.max_candidates):
            return ()
        outlook = self._outlooks.get(sequence)
        if outlook is None:
            outlook = self._outlooks[sequence] = ChainOutlook(self._acceptance)
        return outlook.candidates(len(sequence.tokens), limit)

    def seconds(self, lengths: Sequence[int]) -> float:
        rows = [sum(length > step for length in lengths) for step in range(max(lengths))]
        return sum(map(self.costs.seconds, rows))

    def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        guesses = [_Guess(sequence, outlook, self._writer(sequence)) for sequence, outlook in proposals]
        going_on = self._read(guesses)
        while going_on:
            going_on = self._read(going_on)
        return [guess.proposal for guess in guesses]

    def observe(self, sequence: Generation, proposal: Proposal, accepted: Sequence[int]) -> None:
        if (outlook := self._outlooks.get(sequence)) is not None:
            refused = len(accepted) < len(proposal) and not (sequence.finished or sequence.undecided)
            outlook.observe(len(accepted), refused)

    def forget(self, sequence: Generation) -> None:
        self._outlooks.pop(sequence, None)
        writer = self._writers.pop(sequence, None)
        if writer is not None:
            writer.catch_up(sequence.tokens)  # what the last step accepted can be found again
            writer.cache.free()

    def _writer(self, sequence: Generation) -> _Writer:
        writer = self._writers.get(sequence)
        if writer is None:
            writer = self._writers[sequence] = _Writer(self.blocks, sequence)
        writer.catch_up(sequence.tokens)
        return writer

    def _read(self, guesses: list[_Guess]) -> list[_Guess]:
        """One step of the draft: a token more for each that has read all; returns those that go on.

        A sequence without a block to go on in, or with much to catch up, has to make do with what it has.
        """
        budget = self._max_step_tokens
        runs: list[Run[_Writer]] = []
        reading: list[_Guess] = []
        for guess in guesses:
            writer = guess.writer
            past, count = writer.cache.length, min(writer.num_unread, _CATCH_UP_TOKENS, budget)
            if count and self._knows(writer.tokens[past : past + count]) and writer.cache.append(count):
                budget -= count
                runs.append(Run(writer, past, count, num_logits=int(not writer.num_unread)))
                reading.append(guess)
        if not runs:
            return []
        logits = self._run(runs)
        row = 0
        going_on = []
        for run, guess in zip(runs, reading, strict=True):
            if run.num_logits:
                going_on += [guess] * guess.extend(self._padded(logits[row]))
                row += 1
        return going_on

    def _knows(self, tokens: list[int]) -> bool:
        """Whether all tokens are in the draft's vocabulary, which may be the smaller one."""
        return max(tokens) < self.backend.vocab_size

    def _run(self, runs: list[Run[_Writer]]) -> Float32Array:
        for group, pairs in self.blocks.take_copies().items():
            self.backend.copy_blocks(group, pairs)
        batch = self._buffers.fill(runs)
        started = time.perf_counter()
        logits = self.backend.run(batch)
        self.costs.count(len(batch.input_ids), time.perf_counter() - started)
        return logits

    def _padded(self, logits: Float32Array) -> Float32Array:
        """The draft's logits float32 [its vocabulary] as the target's; what it lacks is never said."""
        missing = self._vocab_size - len(logits)
        return np.pad(logits, (0, missing), constant_values=-np.inf) if missing else logits

    def check_integrity(self) -> None:
        self.blocks.check_integrity(writer.cache for writer in self._writers.values())

    def close(self) -> None:
        self._writers.clear()
        self.backend.close()
