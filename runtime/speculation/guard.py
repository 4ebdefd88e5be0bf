"""GuardedProposer: a proposer that can do no harm, whatever it raises or proposes."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from pagelet.models.errors import InputError, PageletError
from pagelet.runtime.speculation.proposal import Candidate, Proposal, is_chain, main_chain
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.tasks import Generation

R = TypeVar("R")


class GuardedProposer(Proposer):
    """Passes on what another proposer says, until it fails: then it is closed, and proposes nothing more.

    Attributes:
        failure: what it failed with; None while it works.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, *, trees: bool) -> None:
        """Without `trees` only the first candidate for each place is taken.

        Raises:
            InputError: not a Proposer.
        """
        if not isinstance(proposer, Proposer):
            raise InputError(f"proposers has {proposer!r}; expected objects of classes made from Proposer.")
        self.name = proposer.name
        self.failure: str | None = None
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._trees = trees
        self._closed = False

    def outlook(self, sequence: Generation, limit: int) -> Proposal:
        return self._try(lambda: self._checked(self._proposer.outlook(sequence, limit)[:limit]), ())

    def seconds(self, lengths: Sequence[int]) -> float:
        return self._try(lambda: _checked_seconds(self._proposer.seconds(lengths)), 0.0)

    def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        return self._try(lambda: self._filled(proposals), [()] * len(proposals))

    def observe(self, sequence: Generation, proposal: Proposal, accepted: Sequence[int]) -> None:
        self._try(lambda: self._proposer.observe(sequence, proposal, accepted), None)

    def forget(self, sequence: Generation) -> None:
        self._try(lambda: self._proposer.forget(sequence), None)

    def check_integrity(self) -> None:
        if not self._closed:
            self._proposer.check_integrity()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._proposer.close()
        except BaseException as error:
            self.failure = f"{self.failure or self.name}; closing it: {error!r}"

    def _try(self, call: Callable[[], R], otherwise: R) -> R:
        if self._closed:
            return otherwise
        try:
            return call()
        except BaseException as error:  # sys.exit() too is not for the step thread to obey
            self.failure = f"{self.name}: {error if isinstance(error, PageletError) else repr(error)}"
            self.close()
            return otherwise

    def _filled(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        filled = self._proposer.fill(proposals)
        if len(filled) != len(proposals):
            raise InputError(f"{len(filled)} proposals for {len(proposals)} sequences.")
        return [
            self._checked(proposal[: len(outlook)], filled=True)
            for proposal, (_, outlook) in zip(filled, proposals, strict=True)
        ]

    def _checked(self, proposal: Proposal, *, filled: bool = False) -> Proposal:
        for index, candidate in enumerate(proposal):
            token_id, parent, probability, _ = candidate
            is_token = not filled if token_id is None else 0 <= token_id < self._vocab_size
            if not (is_token and -1 <= parent < index and 0.0 <= probability <= 1.0):
                raise InputError(_fault(index, candidate, self._vocab_size))
        return proposal if self._trees or is_chain(proposal) else main_chain(proposal)


def _checked_seconds(seconds: float) -> float:
    if not (seconds >= 0.0 and math.isfinite(seconds)):
        raise InputError(f"seconds() is {seconds}; expected a finite number, at least 0.")
    return seconds


def _fault(index: int, candidate: Candidate, vocab_size: int) -> str:
    return (
        f"candidate {index} is {candidate}; expected a token id below {vocab_size}, a parent before it or -1,"
        " and a probability from 0 to 1."
    )
