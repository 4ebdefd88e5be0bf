"""Which proposers an engine's config asks for. A new one gets its line here."""

from pagelet.runtime.config import EngineConfig
from pagelet.runtime.speculation.ngram import NgramProposer
from pagelet.runtime.speculation.proposer import Proposer


def lookups(config: EngineConfig) -> list[Proposer]:
    """The proposers that need no model of their own."""
    if config.speculate in ("auto", "ngram"):
        return [NgramProposer(share_ngrams=config.share_ngrams)]
    return []
