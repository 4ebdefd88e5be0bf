"""TextStream: what it shows, piece by piece, is what decoding and cutting the whole gives."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import CORPUS, KINDS, byte_level, opened, sentencepiece_bpe

from pagelet.models.manifest import TextSettings
from pagelet.models.text import TextStream, Tokenizer

BYTE_LEVEL = Tokenizer(byte_level(), TextSettings())
SENTENCEPIECE = Tokenizer(sentencepiece_bpe(), TextSettings())
TEXT = "Hello  the fox, 😀👍 café 你好\n\n  x</s>"


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return opened(tmp_path_factory.mktemp(request.param), KINDS[request.param]())


def shown(stream: TextStream, ids: list[int]) -> list[str]:
    return [*map(stream.push, ids), stream.finish()]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_all_pieces_are_the_decoded_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any ids: invalid bytes, special tokens and ids without a token among them."""
    any_id = st.integers(0, tokenizer.vocab_size + 3)
    of_text = st.text(max_size=4).map(tokenizer.encode)
    parts = data.draw(st.lists(st.one_of(of_text, st.lists(any_id, max_size=12)), max_size=8))
    ids = [token_id for part in parts for token_id in part]
    stream = TextStream(tokenizer)
    assert "".join(shown(stream, ids)) == stream.text == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.sampled_from("€é😀a▁ "), st.text(max_size=2)), max_size=10).map("".join))
def test_byte_tokens_of_whole_characters_are_as_tokenizers_decodes_them(text: str) -> None:
    theirs = sentencepiece_bpe()
    ids = [theirs.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert "".join(shown(TextStream(SENTENCEPIECE), ids)) == theirs.decode(ids) == text.removeprefix(" ")


def test_an_invalid_byte_does_not_take_back_what_was_shown() -> None:
    euro, invalid = SENTENCEPIECE.encode("€")[1:], [SENTENCEPIECE.encode("ÿ")[1]] * 2
    pieces = shown(TextStream(SENTENCEPIECE), [*euro, *invalid, *SENTENCEPIECE.encode("x")])
    assert pieces[:3] == ["", "", "€"]
    assert "".join(pieces) == "€\ufffd\ufffd x"


@pytest.mark.parametrize("text", ["😀", "你", "é", "👍🏽", "a😀b"])
def test_no_piece_has_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = shown(TextStream(tokenizer), ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_an_emoji_of_several_tokens_is_one_piece() -> None:
    ids = BYTE_LEVEL.encode("😀")
    assert len(ids) >= 3
    assert shown(TextStream(BYTE_LEVEL), ids) == [""] * (len(ids) - 1) + ["😀", ""]
    assert shown(TextStream(BYTE_LEVEL), ids[:-1]) == [""] * (len(ids) - 1) + ["\ufffd"]


def test_a_long_text_decodes_a_bounded_window() -> None:
    class Counting(Tokenizer):
        longest = 0

        def decode_text(self, ids: list[int]) -> str:  # type: ignore[override]
            self.longest = max(self.longest, len(ids))
            return super().decode_text(ids)

    counting = Counting(byte_level(), TextSettings())
    invalid = BYTE_LEVEL.encode("你")[-1:] * 100  # continuation bytes: never a character
    ids = [*BYTE_LEVEL.encode("".join(CORPUS) * 5), *invalid, *BYTE_LEVEL.encode("fox")]
    assert "".join(shown(TextStream(counting), ids)) == BYTE_LEVEL.decode(ids)
    assert counting.longest <= 20


def test_special_tokens_and_unknown_ids_show_nothing() -> None:
    ids = [1, *BYTE_LEVEL.encode("fox"), 2, 0, 10**6]
    assert "".join(shown(TextStream(BYTE_LEVEL), ids)) == "fox"


def test_a_prompts_tail_keeps_the_space_before_the_first_word(tmp_path: Path) -> None:
    prompt, answer = SENTENCEPIECE.encode("say"), SENTENCEPIECE.encode("hello")
    assert "".join(shown(TextStream(SENTENCEPIECE), answer)) == "hello"
    assert "".join(shown(TextStream(SENTENCEPIECE, prompt_tail=[*prompt, 2]), answer)) == " hello"


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; the longest of those that end together."""
    for end in range(len(text) + 1):
        if matches := [len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(matches)], True
    return text, False


stops = st.lists(
    st.one_of(st.sampled_from(["fox", "the fox", "\n\n", "😀👍", "好", "  ", "He", "</s>", "café 你"]),
              st.text(alphabet="the fox😀\n", min_size=1, max_size=4)),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(stops=stops, text=st.one_of(st.just(TEXT), st.text(alphabet="the fox😀👍\n", max_size=30)))
def test_the_text_ends_right_before_the_first_stop_string(
    tokenizer: Tokenizer, stops: list[str], text: str
) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, stops)
    pieces = shown(stream, ids)
    assert ("".join(pieces), stream.stopped) == cut(tokenizer.decode(ids), stops)
    assert stream.text == "".join(pieces)
    if stream.stopped:
        assert stream.push(5) == ""


@settings(max_examples=100, deadline=None)
@given(stops=stops)
def test_nothing_is_shown_that_a_stop_string_may_still_take_back(stops: list[str]) -> None:
    """After every token, all is shown but what begins a stop string."""
    ids = BYTE_LEVEL.encode(TEXT)
    stream = TextStream(BYTE_LEVEL, stops)
    for count, token_id in enumerate(ids, 1):
        stream.push(token_id)
        if stream.stopped:
            break
        whole = BYTE_LEVEL.decode(ids[:count])
        if whole.endswith("\ufffd"):
            continue
        held = whole.removeprefix(stream.text)
        assert whole == stream.text + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_inside_a_token_cuts_there() -> None:
    ids = BYTE_LEVEL.encode(" the fox")
    assert len(ids) == 2
    stream = TextStream(BYTE_LEVEL, ["o"])
    assert shown(stream, ids) == [" the", " f", ""]
    assert stream.stopped


def test_a_stop_string_at_the_very_start_leaves_nothing() -> None:
    stream = TextStream(BYTE_LEVEL, ["the fox"])
    assert shown(stream, BYTE_LEVEL.encode("the fox jumps"))[-1] == ""
    assert (stream.text, stream.stopped) == ("", True)


def test_what_only_began_a_stop_string_is_shown_at_the_end() -> None:
    stream = TextStream(BYTE_LEVEL, ["fox jumps"])
    pieces = shown(stream, BYTE_LEVEL.encode("the fox"))
    assert pieces[-1].endswith("fox")
    assert (stream.text, stream.stopped) == ("the fox", False)


def test_a_stop_string_that_the_held_back_bytes_complete() -> None:
    stream = TextStream(BYTE_LEVEL, ["\ufffd"])
    assert shown(stream, [*BYTE_LEVEL.encode("fox"), *BYTE_LEVEL.encode("😀")[:2]])[-1] == ""
    assert (stream.text, stream.stopped) == ("fox", True)
