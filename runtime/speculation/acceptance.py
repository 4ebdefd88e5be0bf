"""How likely is it that a proposed token is accepted? Counted per kind of evidence, the past forgotten."""

from array import array
from collections.abc import Sequence


class Acceptance:
    """Estimated acceptance per kind of evidence, a small integer.

    A rate is (accepted + weight × prior) / (tried + weight): the mean of a beta distribution whose counts
    fade. They fade with every trial, so that what changed is seen, and with every token of text, so that
    after failures the rate creeps back to its prior and the kind is tried again now and then: at a rate
    where it just is not proposed, a failure is worth log2(1 + 1 / tried) half-lives of silence.

    The prior is a number per kind, or another Acceptance that learns with this one: an engine's for each
    of its requests.
    """

    def __init__(
        self, prior: "Sequence[float] | Acceptance", *, weight: float, window: float, half_life: float
    ) -> None:
        """`weight`: trials that the prior counts for; `window`: trials, and `half_life`: tokens, that are
        remembered."""
        self.num_kinds: int = prior.num_kinds if isinstance(prior, Acceptance) else len(prior)
        self._prior = prior
        self._weight = weight
        self._window = window
        self._keep: float = 1 - 1 / window
        self._fade: float = 0.5 ** (1 / half_life)
        self._clock = 0
        # Of each kind: faded counts, and the clock when they were right.
        self._tried = array("d", [0] * self.num_kinds)
        self._accepted = array("d", [0] * self.num_kinds)
        self._updated = [0] * self.num_kinds

    @classmethod
    def of_engine(cls, priors: Sequence[float]) -> "Acceptance":
        """What all requests have in common: long remembered. Speed hardly depends on these numbers."""
        return cls(priors, weight=6, window=400, half_life=4000)

    @classmethod
    def of_request(cls, engine: "Acceptance") -> "Acceptance":
        """Of one request: soon learned and soon forgotten."""
        return cls(engine, weight=3, window=30, half_life=60)

    def pass_tokens(self, count: int) -> None:
        """The text has grown by `count` tokens."""
        self._clock += count
        if isinstance(self._prior, Acceptance):
            self._prior.pass_tokens(count)

    def rate(self, kind: int) -> float:
        """Probability between 0 and 1 that a token proposed for this kind of reason is accepted."""
        prior = self._prior.rate(kind) if isinstance(self._prior, Acceptance) else self._prior[kind]
        faded: float = self._fade ** (self._clock - self._updated[kind])
        accepted = faded * self._accepted[kind] + self._weight * prior
        return accepted / (faded * self._tried[kind] + self._weight)

    def record(self, kind: int, accepted: int, failed: int) -> None:
        """Of the tokens proposed for this kind of reason `accepted` were accepted, and after them `failed`
        were not."""
        faded: float = self._fade ** (self._clock - self._updated[kind])
        self._updated[kind] = self._clock
        # Sums of geometric series: each trial fades those before it.
        fades = self._keep**failed
        kept = self._keep ** (accepted + failed)
        self._tried[kind] = faded * kept * self._tried[kind] + self._window * (1 - kept)
        self._accepted[kind] = faded * kept * self._accepted[kind] + self._window * (fades - kept)
        if isinstance(self._prior, Acceptance):
            self._prior.record(kind, accepted, failed)
