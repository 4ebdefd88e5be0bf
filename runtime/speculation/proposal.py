"""Candidate tokens for the places after a sequence's last token: a chain, or a tree of alternatives."""

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """One guessed token.

    Attributes:
        token_id: its row of the vocabulary; None where the proposer computes it only when it is wanted.
        parent: index in its proposal of the candidate that it follows; -1: it follows the sequence's
            last token.
        probability: estimate that it is accepted, given that its parent was.
        evidence: what the estimate rests on, for the proposer that made it; nobody else reads it.
    """

    token_id: int | None
    parent: int
    probability: float
    evidence: int = 0

    @property
    def token(self) -> int:
        """The token id, of a candidate that has one."""
        assert self.token_id is not None, "a candidate is verified without its token"
        return self.token_id


# Parents come before their children.
Proposal = Sequence[Candidate]
# Of candidates in their proposal.
TokenIndices = Sequence[int]


def is_chain(proposal: Proposal) -> bool:
    """Whether each candidate follows the one before it."""
    return all(candidate.parent == index - 1 for index, candidate in enumerate(proposal))


def main_chain(proposal: Proposal) -> Proposal:
    """The first candidate after each other, for a target that verifies chains only."""
    chain: list[Candidate] = []
    last = -1
    for index, candidate in enumerate(proposal):
        if candidate.parent == last:
            chain.append(candidate._replace(parent=len(chain) - 1))
            last = index
    return chain


def depths(proposal: Proposal) -> list[int]:
    """How many candidates each one descends from."""
    depths: list[int] = []
    for candidate in proposal:
        depths.append(depths[candidate.parent] + 1 if candidate.parent >= 0 else 0)
    return depths


def follower(proposal: Proposal, parent: int, token_id: int) -> int:
    """Index of the candidate `token_id` that follows candidate `parent`; -1 where there is none."""
    for index in range(parent + 1, len(proposal)):
        if proposal[index].parent == parent and proposal[index].token_id == token_id:
            return index
    return -1
