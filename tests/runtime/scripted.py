"""A proposer that knows the text: for tests of what becomes of proposals."""

from collections.abc import Callable, Sequence

from fake_backend import greedy

from pagelet.runtime.speculation.proposal import Candidate, Proposal
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.tasks import Generation

# (tokens so far, most tokens wanted) to the tokens that may follow.
Guess = Callable[[list[int], int], list[int]]


def greedy_guess(vocab_size: int, windows: tuple[int, ...] = (0,)) -> Guess:
    """What a FakeBackend will say."""
    return lambda tokens, limit: greedy(tokens, limit, vocab_size, windows)


def recorded(texts: Sequence[Sequence[int]]) -> Guess:
    """How the first of these texts that begins with the tokens goes on."""

    def guess(tokens: list[int], limit: int) -> list[int]:
        length = len(tokens)
        found = (text[length : length + limit] for text in texts if list(text[:length]) == tokens)
        return list(next(found, ()))

    return guess


def half_right(guess: Guess) -> Guess:
    """The same, but each third place of the text is guessed wrong."""

    def guess_wrong(tokens: list[int], limit: int) -> list[int]:
        right = guess(tokens, limit)
        return [token ^ int((len(tokens) + index) % 3 == 0) for index, token in enumerate(right)]

    return guess_wrong


class ScriptedProposer(Proposer):
    """Proposes what `guess(tokens, limit)` says."""

    name = "scripted"

    def __init__(self, guess: Guess, seconds: float = 0.0) -> None:
        self._guess = guess
        self._seconds = seconds
        self.forgotten: list[Generation] = []
        self.observed: list[tuple[int, int]] = []  # (proposed, accepted)
        self.closed = False

    def outlook(self, sequence: Generation, limit: int) -> Proposal:
        tokens = self._guess(sequence.tokens, limit)[:limit]
        return [Candidate(token, index - 1, 0.9) for index, token in enumerate(tokens)]

    def seconds(self, lengths: Sequence[int]) -> float:
        return self._seconds

    def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        return [proposal for _, proposal in proposals]

    def observe(self, sequence: Generation, proposal: Proposal, accepted: Sequence[int]) -> None:
        self.observed.append((len(proposal), len(accepted)))

    def forget(self, sequence: Generation) -> None:
        self.forgotten.append(sequence)

    def close(self) -> None:
        self.closed = True
