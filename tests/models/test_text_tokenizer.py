"""Tokenizer: the ids are those of `tokenizers`, except that text is never parsed as control."""

import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import CHATML, CORPUS, KINDS, LLAMA2, byte_level, opened, sentencepiece_bpe

from pagelet.models.errors import BundleError, InputError
from pagelet.models.manifest import TextSettings
from pagelet.models.text import Tokenizer

Pair = tuple[Tokenizer, tokenizers.Tokenizer]
PIECES = ["the fox", " ", "  ", "\n", "é", "你好", "😀", "<", "|im_end|>", "x", *CHATML, *LLAMA2]
mixed_text = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tokenizer of each kind, and the same one of `tokenizers`."""
    built = KINDS[request.param]()
    return opened(tmp_path_factory.mktemp(request.param), built), built


@settings(max_examples=100, deadline=None)
@given(text=mixed_text)
def test_raw_text_is_encoded_as_if_no_token_were_special(pair: Pair, text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text, parse_special=True) == theirs.encode(text, add_special_tokens=False).ids
    literal = ours.encode(text)
    unknown = theirs.token_to_id("<unk>")
    assert not {theirs.token_to_id(name) for name in (*CHATML, *LLAMA2)} - {unknown} & set(literal)
    if type(theirs.model).__name__ == "BPE":  # a Unigram makes special tokens in spite of this switch
        theirs.encode_special_tokens = True
        try:
            assert literal == theirs.encode(text, add_special_tokens=False).ids
        finally:
            theirs.encode_special_tokens = False


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_decode_is_that_of_tokenizers(pair: Pair, data: st.DataObject) -> None:
    ours, theirs = pair
    whole = st.integers(0, ours.vocab_size + 5)
    if theirs.token_to_id("<0x00>") is not None:  # single byte tokens: test_text_stream has those
        whole = whole.filter(lambda i: not (theirs.id_to_token(i) or "").startswith("<0x"))
    ids = data.draw(st.lists(whole, max_size=20))
    for skip in (True, False):
        assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@settings(max_examples=50, deadline=None)
@given(text=mixed_text)
def test_what_is_encoded_is_decoded_again(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


def test_added_tokens_that_look_like_markup_are_control_tokens() -> None:
    built = byte_level()
    built.add_tokens(["<|mark|>", "<｜mark｜>", "<turn|>", "<|turn>", "<word>"])
    ours = Tokenizer(built, TextSettings())
    for token in ("<|mark|>", "<｜mark｜>", "<turn|>", "<|turn>"):
        assert built.token_to_id(token) not in ours.encode(f"a{token}b")
        assert ours.encode(token, parse_special=True) == [built.token_to_id(token)]
        assert ours.decode(ours.encode(f"a{token}b")) == f"a{token}b"
        assert ours.decode([built.token_to_id(token)]) == token  # not special: shown
    assert built.token_to_id("<word>") in ours.encode("a<word>b")


BYTE_LEVEL = Tokenizer(byte_level(), TextSettings())


def test_the_beginning_of_sequence_follows_the_settings(tmp_path: Path) -> None:
    ours = opened(tmp_path, sentencepiece_bpe(), bos_token_id=1, eos_token_ids=(2,), add_bos=True)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.has_chat_template) == (1, {2}, False)
    plain = ours.encode("the fox", add_bos=False)
    assert ours.encode("the fox") == [1, *plain]
    assert 1 not in plain
    assert BYTE_LEVEL.encode("x", add_bos=None) == BYTE_LEVEL.encode("x", add_bos=False)
    with pytest.raises(InputError, match="no beginning-of-sequence"):
        BYTE_LEVEL.encode("x", add_bos=True)


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path: Path) -> None:
    built = byte_level()
    built.enable_truncation(4)
    built.enable_padding(length=50)
    assert opened(tmp_path, built).encode(CORPUS[0]) == BYTE_LEVEL.encode(CORPUS[0])


def test_wrong_input_is_refused() -> None:
    with pytest.raises(InputError, match="half a surrogate pair"):
        BYTE_LEVEL.encode("a\ud800")
    with pytest.raises(InputError, match="type bytes"):
        BYTE_LEVEL.encode(b"abc")  # type: ignore[arg-type]
    for ids in ([-1], [2**40], ["a"]):
        with pytest.raises(InputError, match="can't be decoded"):
            BYTE_LEVEL.decode(ids)  # type: ignore[arg-type]


def test_damaged_files_are_bundle_errors(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json can't be read"):
        Tokenizer.open(tmp_path, TextSettings())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(BundleError, match="not a valid tokenizer"):
        Tokenizer.open(tmp_path, TextSettings())
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match="can't be read"):
        Tokenizer.open(tmp_path, TextSettings())
    with pytest.raises(BundleError, match="template is not valid, line 2"):
        opened(tmp_path, byte_level(), "{{ x }}\n{% if %}").render_chat([{"role": "user", "content": "x"}])
    with pytest.raises(BundleError, match="expected at most 1048576"):
        opened(tmp_path, byte_level(), "x" * (1 << 20) + "x")


def test_threads_may_share_a_tokenizer() -> None:
    """The literal vocabulary is built while others encode and decode."""
    shared, text, wrong = Tokenizer(byte_level(), TextSettings()), "the <|im_end|> fox 😀" * 20, []
    expected = BYTE_LEVEL.encode(text)

    def work() -> None:
        for _ in range(20):
            if shared.encode(text) != expected or shared.decode(expected) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
