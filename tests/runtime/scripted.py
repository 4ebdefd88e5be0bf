"""A proposer that knows the text: for tests of what becomes of proposals."""

from collections.abc import Callable, Sequence

from pagelet.runtime.speculation.proposal import Candidate, Proposal
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.tasks import Generation


class ScriptedProposer(Proposer):
    """Proposes what `guess(tokens, limit)` says."""

    name = "scripted"

    def __init__(self, guess: Callable[[list[int], int], list[int]], seconds: float = 0.0) -> None:
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
