"""What the n-gram proposer proposes, learns, shares and forgets."""

import tracemalloc
import weakref
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagelet.runtime.request_options import RequestOptions
from pagelet.runtime.speculation.ngram import NgramProposer, SharedTexts
from pagelet.runtime.speculation.proposal import Proposal, is_chain
from pagelet.runtime.tasks import Generation

texts = st.lists(st.integers(0, 2), max_size=60)


@dataclass
class Asked:
    """The part of a Request that a proposer reads."""

    prompt_tokens: int = 0
    options: RequestOptions = field(default_factory=RequestOptions)


@dataclass(eq=False)
class Text:
    """The part of a Generation that a proposer reads."""

    tokens: list[int]
    request: Asked = field(default_factory=Asked)
    finished: bool = False
    undecided: bool = False


def generation(tokens: list[int], **options: object) -> Generation:
    return cast(Generation, Text(tokens, Asked(len(tokens), RequestOptions(**options))))  # type: ignore[arg-type]


def tokens_of(proposal: Proposal) -> list[int]:
    return [candidate.token for candidate in proposal]


def finish(proposer: NgramProposer, tokens: list[int], **options: object) -> None:
    """Let the proposer see a sequence that ends with these tokens."""
    sequence = generation(tokens, **options)
    proposer.outlook(sequence, 8)
    cast(Text, sequence).finished = True
    proposer.forget(sequence)


def fail(proposer: NgramProposer, sequence: Generation, times: int) -> None:
    for _ in range(times):
        proposer.observe(sequence, proposer.outlook(sequence, 1), [])


def followers(tokens: list[int]) -> set[int]:
    """What came after earlier occurrences of the longest suffix that has any, by a search."""
    for length in range(len(tokens) - 1, 0, -1):
        suffix = tokens[len(tokens) - length :]
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == suffix]
        if ends:
            return {tokens[end] for end in ends}
    return set()


@given(texts, st.lists(st.integers(1, 9), max_size=8))
def test_it_goes_on_as_the_longest_suffix_did(tokens: list[int], pieces: list[int]) -> None:
    proposer = NgramProposer()
    sequence = generation([])
    for piece in [*pieces, 60]:
        sequence.tokens.extend(tokens[len(sequence.tokens) : len(sequence.tokens) + piece])
        first = proposer.outlook(sequence, 1)
        expected = followers(sequence.tokens)
        assert set(tokens_of(first)) <= expected
        assert bool(first) == bool(expected)


@given(texts, st.integers(0, 70))
def test_a_proposal_may_be_cut_anywhere(tokens: list[int], limit: int) -> None:
    proposal = NgramProposer().outlook(generation(tokens), limit)
    assert len(proposal) <= limit
    assert is_chain(proposal)
    assert all(0 < candidate.probability < 1 for candidate in proposal)
    for cut in range(len(proposal)):
        assert tokens_of(NgramProposer().outlook(generation(tokens), cut)) == tokens_of(proposal[:cut])


@pytest.mark.parametrize("period", [1, 2, 3, 7, 20])
def test_a_loop_is_proposed_at_full_length(period: int) -> None:
    loop = list(range(period))
    proposal = NgramProposer().outlook(generation(loop * 4), 48)
    assert tokens_of(proposal) == (loop * 48)[:48]
    # Nor is it less sure of what it goes on with behind the known text.
    probabilities = [candidate.probability for candidate in proposal]
    assert probabilities == sorted(probabilities)


def test_a_copy_is_proposed_with_growing_confidence() -> None:
    passage = list(range(100))
    proposal = NgramProposer().outlook(generation([*passage, 500, *passage[:5]]), 40)
    assert tokens_of(proposal) == passage[5:45]
    probabilities = [candidate.probability for candidate in proposal]
    assert probabilities == sorted(probabilities)
    assert probabilities[0] < probabilities[-1]


def test_where_different_tokens_followed_it_is_less_sure() -> None:
    one = NgramProposer().outlook(generation([1, 2, 3, 9, 1, 2]), 1)
    several = NgramProposer().outlook(generation([1, 2, 3, 1, 2, 4, 9, 1, 2]), 1)
    assert tokens_of(several) == [4]
    assert several[0].probability < one[0].probability


def test_nothing_follows_a_new_token() -> None:
    proposer = NgramProposer()
    assert not proposer.outlook(generation([]), 8)
    assert not proposer.outlook(generation([1, 2, 1, 2, 3]), 8)


def test_a_long_prompt_is_read_in_pieces() -> None:
    proposer = NgramProposer()
    sequence = generation([*range(1_300), 17, 18])
    # At 512 tokens a time the third piece is the last.
    outlooks = [tokens_of(proposer.outlook(sequence, 4)) for _ in range(4)]
    assert outlooks == [[], [], [19, 20, 21, 22], [19, 20, 21, 22]]


def test_failures_are_learned_by_the_sequence_and_less_so_by_others() -> None:
    proposer = NgramProposer()
    sequence, other = generation([1, 2, 3, 9, 1, 2]), generation([1, 2, 3, 9, 1, 2])
    before = proposer.outlook(sequence, 1)[0].probability
    fail(proposer, sequence, 20)
    after, others = (proposer.outlook(asked, 1)[0].probability for asked in (sequence, other))
    assert after < others < before
    # What failed were matches of two tokens.
    longer = proposer.outlook(generation([1, 2, 3, 9, 1, 2, 3]), 1)[0].probability
    assert longer == NgramProposer().outlook(generation([1, 2, 3, 9, 1, 2, 3]), 1)[0].probability


def test_only_what_was_tried_is_counted() -> None:
    passage = list(range(40))
    proposer = NgramProposer()
    sequence = generation([*passage, 500, 0])
    proposal = proposer.outlook(sequence, 12)
    proposer.observe(sequence, proposal, [0, 1])
    now = proposer.outlook(sequence, 12)
    changes = [new.probability - old.probability for old, new in zip(proposal, now, strict=True)]
    # Lengths 1 and 2 were right, 3 was wrong, those of 4 and more never came up.
    assert changes[0] > 0
    assert changes[1] > 0
    assert changes[2] < 0
    assert not any(changes[3:])


@pytest.mark.parametrize("name", ["finished", "undecided"])
def test_a_candidate_that_the_step_left_open_did_not_fail(name: str) -> None:
    proposer = NgramProposer()
    sequence = generation([1, 2, 3, 9, 1, 2])
    before = proposer.outlook(sequence, 1)
    setattr(sequence, name, True)
    proposer.observe(sequence, before, [])
    assert proposer.outlook(sequence, 1) == before


def test_what_failed_is_tried_again_after_a_while() -> None:
    proposer = NgramProposer()
    sequence = generation([1, 2, 3, 9, 1, 2])
    before = proposer.outlook(sequence, 1)[0].probability
    fail(proposer, sequence, 100)
    assert not proposer.outlook(sequence, 1)
    # New tokens, then the same match again.
    sequence.tokens.extend([*range(100, 20_000), 9, 1, 2])
    while not (proposal := proposer.outlook(sequence, 1)):
        pass
    assert proposal[0].probability > 0.5 * before


def test_it_has_no_costs_and_fills_what_is_wanted() -> None:
    proposer = NgramProposer()
    sequence = generation([1, 2, 1, 2])
    wanted = proposer.outlook(sequence, 8)[:3]
    assert proposer.fill([(sequence, wanted)]) == [wanted]
    assert proposer.seconds([3, 8]) == 0


def test_forgotten_sequences_take_no_memory() -> None:
    proposer = NgramProposer()
    tracemalloc.start()
    base, _ = tracemalloc.get_traced_memory()
    sequence = generation([*range(500), 5, 6])
    assert proposer.outlook(sequence, 4)
    reference = weakref.ref(sequence)
    proposer.forget(sequence)
    proposer.observe(sequence, [], [])
    del sequence
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reference() is None
    # What an emptied dict keeps; the history of 500 tokens had 50 KB and more.
    assert left - base < 10_000


PASSAGE = list(range(100, 160))


def test_other_texts_are_not_read_unless_asked_for() -> None:
    proposer = NgramProposer()
    finish(proposer, PASSAGE)
    assert not proposer.outlook(generation([7, 100, 101]), 8)


def test_a_finished_text_is_shared() -> None:
    proposer = NgramProposer(share_ngrams=True)
    running = generation([7, 100])
    assert not proposer.outlook(running, 8)
    finish(proposer, PASSAGE)
    assert tokens_of(proposer.outlook(running, 4)) == [101, 102, 103, 104]
    running.tokens.extend([101, 102])
    finish(proposer, [*PASSAGE[::-1]])
    assert tokens_of(proposer.outlook(running, 4)) == [103, 104, 105, 106]
    # Its end is the end: another text that stands behind it does not follow it.
    assert tokens_of(proposer.outlook(generation([7, 156, 157]), 8)) == [158, 159]
    assert not proposer.outlook(generation([7, 98, 99]), 8)


def test_the_longer_match_wins_and_the_own_text_where_they_are_equal() -> None:
    proposer = NgramProposer(share_ngrams=True)
    finish(proposer, PASSAGE)
    assert tokens_of(proposer.outlook(generation([102, 7, 101, 102]), 1)) == [103]
    assert tokens_of(proposer.outlook(generation([101, 102, 7, 9, 101, 102]), 1)) == [7]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({}, {"cache_salt": "a"}),
        ({"prefix_cache": False}, {}),
        ({}, {"prefix_cache": False}),
    ],
)
def test_texts_stay_with_their_salt(theirs: dict[str, object], ours: dict[str, object]) -> None:
    proposer = NgramProposer(share_ngrams=True)
    finish(proposer, PASSAGE, **theirs)
    assert not proposer.outlook(generation([7, 100, 101], **ours), 8)


def test_a_preempted_text_is_not_shared() -> None:
    proposer = NgramProposer(share_ngrams=True)
    sequence = generation(PASSAGE)
    proposer.outlook(sequence, 8)
    proposer.forget(sequence)
    assert not proposer.outlook(generation([7, 100, 101]), 8)


def test_a_known_beginning_is_kept_once() -> None:
    shared = SharedTexts(10_000)
    turn = list(range(1_000))
    shared.add(None, turn)
    shared.add(None, [*turn, 5_000, 5_001])
    # Beside the new tokens 64 that lead to them, and two separators.
    assert shared.num_tokens == 1_000 + 64 + 2 + 2


def test_of_a_text_too_long_the_end_is_kept() -> None:
    shared = SharedTexts(200)
    shared.add(None, list(range(1_000)))
    (newest,) = shared.of(None)
    assert newest.text.tolist()[:-1] == list(range(1_000 - 99, 1_000))


def test_a_full_generation_makes_way_twice() -> None:
    shared = SharedTexts(200)
    found = []
    for first in range(0, 600, 50):
        shared.add(None, list(range(first, first + 50)))
        found.append(sum(texts.follow(0, 0) >= 0 for texts in shared.of(None)))
        shared.check_integrity()
    # One text fills more than half a generation of 100, so the first goes with the third.
    assert found == [1, 1] + [0] * 10


def test_the_salt_not_used_for_longest_goes_first() -> None:
    shared = SharedTexts(400)
    for salt in "abc":
        shared.add(salt, list(range(120)))
    assert shared.of("a")
    shared.add("d", list(range(120)))
    assert [bool(shared.of(salt)) for salt in "abcd"] == [True, False, True, True]


@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 200)), max_size=30),
)
def test_the_shared_store_keeps_its_bound(max_tokens: int, added: list[tuple[str, int, int]]) -> None:
    shared = SharedTexts(max_tokens)
    for salt, first, length in added:
        shared.add(salt, list(range(first, first + length)))
        shared.check_integrity()


def test_many_salts_are_bounded_as_well() -> None:
    shared = SharedTexts(1_000_000)
    for salt in range(1_000):
        shared.add(str(salt), [1, 2, 3])
        shared.check_integrity()


def test_a_closed_proposer_holds_nothing() -> None:
    proposer = NgramProposer(share_ngrams=True)
    finish(proposer, PASSAGE)
    proposer.check_integrity()
    proposer.close()
    proposer.close()
    assert not proposer.outlook(generation([7, 100, 101]), 8)
