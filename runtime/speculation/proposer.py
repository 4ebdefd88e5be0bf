"""The seam for whatever guesses ahead. A new proposer is a file with a class that has these methods."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pagelet.runtime.speculation.proposal import Proposal
from pagelet.runtime.tasks import Generation


class Proposer(ABC):
    """Guesses the next tokens of sequences. Called by the step thread alone, between steps.

    A guess never changes a text, only its speed: whatever is proposed, the target's own draw decides.
    """

    name: str

    @abstractmethod
    def outlook(self, sequence: Generation, limit: int) -> Proposal:
        """What could be proposed after `sequence.tokens`: up to `limit` candidates, likely ones first.

        Cheap: it is asked before each step, and most of its answer may be dropped. The first candidates that
        have a parent among them or follow the last token are kept, so it may be cut anywhere.
        """

    @abstractmethod
    def seconds(self, lengths: Sequence[int]) -> float:
        """Estimated time that `fill` takes for proposals of these lengths."""

    @abstractmethod
    def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        """The proposals, cut to what is wanted of them, with their tokens. A shorter or empty one is fine."""

    @abstractmethod
    def observe(self, sequence: Generation, proposal: Proposal, accepted: Sequence[int]) -> None:
        """The target has checked a proposal: `accepted` are the indices of what became text, in its order."""

    @abstractmethod
    def forget(self, sequence: Generation) -> None:
        """The sequence is over, or has left the cache for now; `sequence.tokens` are still there."""

    def check_integrity(self) -> None:  # noqa: B027
        """Assert that what it holds is counted right."""

    def close(self) -> None:  # noqa: B027
        """Free what it holds; nothing is asked of it afterwards. Closing twice is fine."""
