"""ChainOutlook: what to expect of guesses that are made one after another."""

import math

from pagelet.runtime.speculation.acceptance import Acceptance
from pagelet.runtime.speculation.proposal import Candidate, Proposal

# The share of its tokens that a guesser is taken to get right before any was verified.
_PRIOR = 0.6
# A candidate that is reached less often would not pay for its row.
_MIN_LIKELIHOOD = 0.05


class ChainOutlook:
    """For one sequence: candidates without tokens, each as likely as those before it turned out to be."""

    def __init__(self, shared: Acceptance) -> None:
        """`shared` is what all sequences of the proposer have in common: see `shared_acceptance`."""
        self._acceptance = Acceptance.of_request(shared)
        self._num_tokens: int | None = None

    def candidates(self, num_tokens: int, limit: int) -> Proposal:
        """At most `limit`, for a text that has `num_tokens` by now."""
        if self._num_tokens is not None:
            self._acceptance.pass_tokens(num_tokens - self._num_tokens)
        self._num_tokens = num_tokens
        rate = self._acceptance.rate(0)
        worth = math.log(_MIN_LIKELIHOOD) / math.log(rate) if 0.0 < rate < 1.0 else limit * rate
        return [Candidate(None, index - 1, rate) for index in range(min(limit, math.floor(worth)))]

    def observe(self, accepted: int, refused: bool) -> None:
        """So many guesses were accepted, and then one was refused, or there was none left."""
        self._acceptance.record(0, accepted, int(refused))


def shared_acceptance() -> Acceptance:
    """What a proposer knows of its guesses in general."""
    return Acceptance.of_engine([_PRIOR])
