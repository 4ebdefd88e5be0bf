"""The suffix automaton against a search through the whole text."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagelet.runtime.speculation.suffix_automaton import NO_STATE, ROOT, SEPARATOR, Cursor, SuffixAutomaton

texts = st.lists(st.integers(0, 2), max_size=40)


def ends(text: list[int], part: list[int]) -> set[int]:
    """Where `part` ended in `text`."""
    return {end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part}


def longest_known(text: list[int], read: list[int]) -> list[int]:
    """The longest suffix of `read` that stands in `text`."""
    suffixes = (read[begin:] for begin in range(len(read) + 1))
    return next(suffix for suffix in suffixes if ends(text, suffix))


def read_all(documents: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for document in documents:
        for token in document:
            automaton.append(token)
        automaton.end_text()
    return automaton


@given(st.lists(texts, max_size=4))
def test_the_match_is_the_longest_suffix_that_occurred_before(documents: list[list[int]]) -> None:
    automaton = SuffixAutomaton()
    before: list[int] = []
    for document in documents:
        for count, token in enumerate(document, 1):
            automaton.append(token)
            known = [*before, *document[: count - 1]]
            # In this text the suffix may overlap itself, so its last token is looked at too.
            lengths = [
                length
                for length in range(count + 1)
                if ends([*known, token], document[count - length : count]) - {len(known) + 1}
            ]
            assert automaton.match_length == max(lengths, default=0)
            if automaton.match != ROOT:
                suffix = document[count - automaton.match_length : count]
                assert automaton.match_end in ends([*known, token], suffix) - {len(known) + 1}
        automaton.end_text()
        before += [*document, SEPARATOR]
    assert automaton.text.tolist() == before


@given(st.lists(texts, max_size=4))
def test_every_state_ends_where_it_says(documents: list[list[int]]) -> None:
    automaton = read_all(documents)
    text = automaton.text.tolist()
    for state in range(1, automaton.num_states):
        longest = text[automaton.ends[state] - automaton.lengths[state] : automaton.ends[state]]
        link = automaton.links[state]
        shorter = longest[len(longest) - automaton.lengths[link] - 1 :]
        # Its strings end at the same places, those of its link at more.
        assert ends(text, longest) == ends(text, shorter)
        assert ends(text, shorter) < ends(text, shorter[1:])


@given(st.lists(texts, max_size=3), texts)
def test_following_reads_exactly_the_substrings(documents: list[list[int]], part: list[int]) -> None:
    automaton = read_all(documents)
    state = ROOT
    for token in part[:6]:
        state = automaton.follow(state, token)
        if state == NO_STATE:
            break
    assert (state != NO_STATE) == any(ends(document, part[:6]) for document in [[], *documents])


@given(st.lists(texts, min_size=1, max_size=3))
def test_a_state_branches_where_different_tokens_followed(documents: list[list[int]]) -> None:
    automaton = read_all(documents)
    text = automaton.text.tolist()
    for state in range(automaton.num_states):
        end = automaton.ends[state]
        places = ends(text, text[end - automaton.lengths[state] : end])
        followers = {text[place] for place in places if place < len(text)} - {SEPARATOR}
        assert automaton.is_branching(state) == (len(followers) > 1)
        assert all(automaton.follow(state, token) > ROOT for token in followers)


@given(st.lists(texts, min_size=1, max_size=3), st.integers(0, 50), st.integers(0, 50))
def test_a_continuation_stays_in_its_text(documents: list[list[int]], end: int, limit: int) -> None:
    text = read_all(documents).text.tolist()
    continuation = read_all(documents).continuation(min(end, len(text) - 1), limit)
    rest = text[min(end, len(text) - 1) :]
    assert continuation == rest[: min(limit, rest.index(SEPARATOR))]


@given(st.lists(texts, max_size=3), texts)
def test_a_cursor_finds_the_longest_known_suffix(documents: list[list[int]], read: list[int]) -> None:
    automaton = read_all(documents)
    text = automaton.text.tolist()
    cursor = Cursor(automaton)
    for count, token in enumerate(read, 1):
        cursor.advance(token)
        suffix = longest_known(text, read[:count])
        assert cursor.length == len(suffix)
        assert cursor.end in ends(text, suffix)


@given(texts, st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=60))
def test_a_cursor_stays_right_while_the_automaton_grows(
    first: list[int], moves: list[tuple[bool, int]]
) -> None:
    automaton = read_all([first])
    at_first = automaton.text.tolist()
    cursor = Cursor(automaton)
    read: list[int] = []
    for grows, token in moves:
        if grows:
            automaton.append(token)
        else:
            cursor.advance(token)
            read.append(token)
        suffix = read[len(read) - cursor.length :]
        assert cursor.end in ends(automaton.text.tolist(), suffix)
        assert automaton.lengths[automaton.links[cursor.state]] < cursor.length or cursor.state == ROOT
        assert cursor.length >= len(longest_known(at_first, read))


class CountingAutomaton(SuffixAutomaton):
    """Counts transitions looked up, of which every step of work has a bounded number."""

    num_followed = 0

    def follow(self, state: int, token: int) -> int:
        self.num_followed += 1
        return super().follow(state, token)


@pytest.mark.parametrize("num_letters", [1, 2, 50, 10_000])
def test_work_and_states_grow_with_the_text_alone(num_letters: int) -> None:
    rng = random.Random(num_letters)
    automaton = CountingAutomaton()
    for _ in range(4_000):
        automaton.append(rng.randrange(num_letters))
    assert automaton.num_states <= 2 * 4_000
    # Each lookup makes one of at most 3n transitions, or shortens a suffix that grows by one per token, or
    # ends one of at most three loops per token.
    assert automaton.num_followed <= 8 * 4_000


def test_a_cursor_works_as_much_as_it_reads() -> None:
    automaton = CountingAutomaton()
    for token in [0] * 2_000:
        automaton.append(token)
    cursor = Cursor(automaton)
    automaton.num_followed = 0
    # Each 1 falls from the longest match back to nothing.
    for _ in range(20):
        for token in [*[0] * 99, 1]:
            cursor.advance(token)
    assert automaton.num_followed <= 2 * 2_000


def test_memory_per_token_is_small() -> None:
    rng = random.Random(3)
    tokens = [min(int(rng.paretovariate(0.8)), 50_000) for _ in range(8_000)]
    tracemalloc.start()
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.append(token)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A thousandth or less of what a token takes in the caches of even a small model; 130 of text.
    assert used < 300 * len(tokens)
