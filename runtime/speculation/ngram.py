"""Proposals out of text that is there: what followed when the last tokens stood somewhere before.

Prompt lookup (Saxena 2023) with the longest match instead of a fixed n, found without a search.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from pagelet.runtime.speculation.acceptance import Acceptance
from pagelet.runtime.speculation.proposal import Candidate, Proposal
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.speculation.suffix_automaton import NO_STATE, ROOT, Cursor, SuffixAutomaton
from pagelet.runtime.tasks import Generation

# Evidence: the length of the match, in buckets, and whether different tokens followed it; apart for the
# sequence's own text and for the shared ones.
_BUCKET_STARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MAX_LENGTH = _BUCKET_STARTS[-1]
_BUCKETS = [sum(start <= length for start in _BUCKET_STARTS) - 1 for length in range(_MAX_LENGTH + 1)]
_BRANCHING = len(_BUCKET_STARTS)
_OWN, _SHARED = 0, 2 * _BRANCHING
# Between what copies and what free texts of a small model gave.
_PRIORS = (0.35, 0.5, 0.6, 0.7, 0.75, 0.85, 0.9, 0.93, 0.96, 0.975, 0.985, 0.99)
_BRANCHING_PRIORS = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
# No row of a step is so cheap that less would pay.
_MIN_PATH_PROBABILITY = 0.01
# Tokens of a text read at once, and of a finished one kept, lest long ones stall the other sequences.
_MAX_READ = 512
_MAX_KEPT = 2048
# How far back a match in the shared texts is looked for.
_CONTEXT = 64
_MAX_SALTS = 64


class SharedTexts:
    """The texts of finished sequences, apart for each salt, `max_tokens` of the newest in all.

    Each salt has two generations of them: a full one makes way for the next, and goes when that is full
    as well. Where all salts together have too much, the one not used for longest goes.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._salts: OrderedDict[str | None, list[SuffixAutomaton]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(len(texts.text) for generations in self._salts.values() for texts in generations)

    def of(self, salt: str | None) -> Sequence[SuffixAutomaton]:
        """The generations of a salt, the newest first."""
        if salt not in self._salts:
            return ()
        self._salts.move_to_end(salt)
        return self._salts[salt]

    def add(self, salt: str | None, tokens: list[int]) -> None:
        """Keep a text without the beginning that is known: a conversation's next turn repeats the last."""
        generations = self._salts.setdefault(salt, [SuffixAutomaton()])
        self._salts.move_to_end(salt)
        capacity = self._max_tokens // 2
        # Of a long text the end is kept: what was generated. A separator will follow it.
        longest = min(capacity - 1, _MAX_KEPT)
        begin = max(_known_prefix(generations[0], tokens) - _CONTEXT, len(tokens) - longest, 0)
        if len(generations[0].text) + len(tokens) - begin >= capacity:
            generations[:] = [SuffixAutomaton(), generations[0]]
        for token in islice(tokens, begin, None):
            generations[0].append(token)
        generations[0].end_text()
        while self.num_tokens > self._max_tokens or len(self._salts) > _MAX_SALTS:
            self._salts.popitem(last=False)

    def clear(self) -> None:
        self._salts.clear()

    def check_integrity(self) -> None:
        """Assert that it keeps within its bounds."""
        assert len(self._salts) <= _MAX_SALTS
        assert self.num_tokens <= self._max_tokens
        assert all(0 < len(generations) <= 2 for generations in self._salts.values())


@dataclass(frozen=True, slots=True)
class _Match:
    """A suffix of a sequence's text that stands in `texts` too, and where it ended there."""

    texts: SuffixAutomaton
    state: int
    end: int
    length: int
    place: int

    def continuation(self, limit: int) -> list[int]:
        """Up to `limit` tokens that followed."""
        tokens = self.texts.continuation(self.end, limit)
        if self.place == _OWN and len(tokens) < limit:
            # The known text ends here: the proposal goes on with itself, as a loop does.
            tokens = (tokens * -(-limit // len(tokens)))[:limit]
        return tokens


@dataclass(slots=True)
class _History:
    """One sequence: its text so far, how its proposals fared, and where the shared texts match it."""

    acceptance: Acceptance
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    cursors: list[Cursor] = field(default_factory=list)

    def read(self, sequence: Generation, shared: Sequence[SuffixAutomaton]) -> bool:
        """Catch up with the sequence's tokens; False if a part of them is left for the next time."""
        begin = len(self.text.text)
        new = sequence.tokens[begin : begin + _MAX_READ]
        for token in new:
            self.text.append(token)
        if begin >= sequence.request.prompt_tokens:
            self.acceptance.pass_tokens(len(new))
        is_current = len(self.text.text) == len(sequence.tokens)
        known = {cursor.automaton: cursor for cursor in self.cursors}
        self.cursors = [known.get(texts) or Cursor(texts) for texts in shared] if is_current else []
        for cursor in self.cursors:
            for token in new if cursor.automaton in known else sequence.tokens[-_CONTEXT:]:
                cursor.advance(token)
        return is_current

    def longest_match(self) -> _Match | None:
        """The longest suffix that has a continuation; the own text's where it is as long as another's."""
        text = self.text
        best = None
        if text.match_length:
            best = _Match(text, text.match, text.match_end, text.match_length, _OWN)
        for cursor in self.cursors:
            is_longer = cursor.length > (best.length if best else 0)
            if is_longer and cursor.automaton.continuation(cursor.end, 1):
                best = _Match(cursor.automaton, cursor.state, cursor.end, cursor.length, _SHARED)
        return best


class NgramProposer(Proposer):
    """Continues the longest suffix of a sequence's text as it went on when it stood there before.

    It looks in the sequence's own text and, with `share_ngrams`, in the last `max_shared_tokens` tokens of
    finished sequences: of those with its `cache_salt`, and only where it uses the prefix cache, since both
    let a reader of one request's timing guess at another's text.
    """

    name = "ngram"

    def __init__(self, *, share_ngrams: bool = False, max_shared_tokens: int = 1 << 15) -> None:
        priors = (*_PRIORS, *_BRANCHING_PRIORS) * 2
        self._acceptance = Acceptance.of_engine(priors)
        self._shared = SharedTexts(max_shared_tokens if share_ngrams else 0)
        self._share_ngrams = share_ngrams
        self._histories: dict[Generation, _History] = {}

    def outlook(self, sequence: Generation, limit: int) -> Proposal:
        history = self._histories.get(sequence)
        if history is None:
            history = _History(Acceptance.of_request(self._acceptance))
            self._histories[sequence] = history
        options = sequence.request.options
        shared = self._shared.of(options.cache_salt) if options.prefix_cache else ()
        if not history.read(sequence, shared):
            return ()
        match = history.longest_match()
        return () if match is None else _chain(match, limit, history.acceptance)

    def seconds(self, lengths: Sequence[int]) -> float:
        return 0.0

    def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        return [proposal for _, proposal in proposals]

    def observe(self, sequence: Generation, proposal: Proposal, accepted: Sequence[int]) -> None:
        if (history := self._histories.get(sequence)) is None:
            return
        # A chain: what was accepted comes first, and of the others only the next one was tried, unless the
        # text ended there or the step left it open.
        num_accepted = len(accepted)
        counts = Counter(candidate.evidence for candidate in proposal[:num_accepted])
        refused = None
        if num_accepted < len(proposal) and not (sequence.finished or sequence.undecided):
            refused = proposal[num_accepted].evidence
            counts.setdefault(refused, 0)
        for kind, count in counts.items():
            history.acceptance.record(kind, count, int(kind == refused))

    def forget(self, sequence: Generation) -> None:
        self._histories.pop(sequence, None)
        options = sequence.request.options
        if self._share_ngrams and sequence.finished and options.prefix_cache:
            self._shared.add(options.cache_salt, sequence.tokens)

    def check_integrity(self) -> None:
        self._shared.check_integrity()

    def close(self) -> None:
        self._histories.clear()
        self._shared.clear()


def _chain(match: _Match, limit: int, acceptance: Acceptance) -> list[Candidate]:
    """Each token on the evidence of a match that those before it have made longer."""
    proposal: list[Candidate] = []
    last_kind, rate, path = -1, 0.0, 1.0
    state = match.state
    for index, token in enumerate(match.continuation(limit)):
        kind = match.place + _BUCKETS[min(match.length + index, _MAX_LENGTH)]
        if match.texts.is_branching(state):
            kind += _BRANCHING
        if kind != last_kind:
            last_kind, rate = kind, acceptance.rate(kind)
        path *= rate
        if path < _MIN_PATH_PROBABILITY:
            break
        proposal.append(Candidate(token, index - 1, rate, kind))
        if state != NO_STATE:  # a loop goes on where the known text ends
            state = match.texts.follow(state, token)
    return proposal


def _known_prefix(texts: SuffixAutomaton, tokens: list[int]) -> int:
    """How many of the first tokens stand in `texts`, one after the other."""
    state = ROOT
    for index, token in enumerate(tokens):
        if (state := texts.follow(state, token)) == NO_STATE:
            return index
    return len(tokens)
