"""SentencePiece BPE models, from `tokenizer.model` and from GGUF, against the sentencepiece library."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.text import write_text_files
from pagelet.exporter.text.document import merges_from_scores
from pagelet.exporter.text.sentencepiece import read_model
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.manifest import TextSettings

Export = Callable[..., tuple[Tokenizer, TextSettings]]


def train(corpus: list[str], **options: Any) -> bytes:
    """A model as Llama 2 has it: BPE, bytes for unknown characters, text taken as it is."""
    stream = io.BytesIO()
    defaults = {
        "model_type": "bpe",
        "vocab_size": 700,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.98,
        "minloglevel": 2,
    }
    lines = [line for text in corpus for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3), model_writer=stream, **(defaults | options)
    )
    return stream.getvalue()


@pytest.fixture(scope="module")
def model(corpus: list[str]) -> bytes:
    return train(corpus)


@pytest.fixture(scope="module")
def library(model: bytes) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.fixture
def from_model(write_folder: Any, vocabulary_960: Any, tmp_path: Path) -> Export:
    """Export from a folder with this tokenizer.model."""

    def build(model: bytes, **tokenizer_config: Any) -> tuple[Tokenizer, TextSettings]:
        folder = write_folder(vocabulary_960, vocab_size=960, tie_word_embeddings=True)
        (folder / "tokenizer.model").write_bytes(model)
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        return export(folder, tmp_path / "bundle")

    return build


@pytest.fixture
def from_pieces(write_gguf: Any, vocabulary_960: Any, tmp_path: Path) -> Export:
    """Export from a GGUF file with the pieces of this model."""

    def build(library: Any, **keys: Any) -> tuple[Tokenizer, TextSettings]:
        ids = range(library.vocab_size())
        metadata = {
            "model": "llama",
            "tokens": [library.id_to_piece(i) for i in ids],
            "scores": [library.get_score(i) for i in ids],
            "token_type": [kind(library, i) for i in ids],
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        named = {f"tokenizer__ggml__{key}": value for key, value in (metadata | keys).items()}
        return export(write_gguf(vocabulary_960, **named), tmp_path / "bundle")

    return build


def kind(library: Any, token_id: int) -> int:
    if library.is_unknown(token_id):
        return 2
    if library.is_control(token_id):
        return 3
    return 6 if library.is_byte(token_id) else 1


def export(source: Path, out: Path) -> tuple[Tokenizer, TextSettings]:
    out.mkdir(exist_ok=True)
    with open_checkpoint(source) as checkpoint:
        settings, _ = write_text_files(checkpoint, out)
    return Tokenizer.from_file(str(out / "tokenizer.json")), settings


def assert_equal(ours: Tokenizer, library: Any, corpus: list[str]) -> None:
    for text in corpus:
        ids = ours.encode(text).ids
        assert ids == library.encode(text)
        assert ours.decode(ids) == library.decode(ids) == text


def test_a_tokenizer_model_encodes_as_the_library_does(from_model, model, library, corpus):
    ours, settings = from_model(model, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert_equal(ours, library, corpus)
    assert ours.encode("</s>").ids == [2]
    assert settings == TextSettings(
        1, (2,), True, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    )
    assert not from_model(model, bos_token="<s>", add_bos_token=False)[1].add_bos


def test_gguf_pieces_encode_as_the_library_does(from_pieces, library, corpus):
    ours, settings = from_pieces(library)
    assert_equal(ours, library, corpus)
    assert settings == TextSettings(1, (2,), True, {"bos_token": "<s>", "eos_token": "</s>"})


def test_without_a_space_in_front(from_model, from_pieces, corpus):
    model = train(corpus, add_dummy_prefix=False)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert_equal(from_model(model)[0], library, corpus)
    assert_equal(from_pieces(library, add_space_prefix=False)[0], library, corpus)


SPACES = ["", " ", "   ", "  two  inner   three ", "\t tab \n  line  \n", " x", "x "]


def test_repeated_spaces_are_dropped_where_the_model_drops_them(from_model, from_pieces, corpus):
    model = train(corpus, remove_extra_whitespaces=True)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    for ours, _ in (from_model(model), from_pieces(library, remove_extra_whitespaces=True)):
        for text in [*corpus, *SPACES]:
            ids = ours.encode(text).ids
            assert ids == library.encode(text)
            assert ours.decode(ids) == library.decode(ids)


def test_what_the_user_defined_is_never_cut_or_joined(from_model, from_pieces, corpus):
    """As Gemma's model has it: runs of line breaks and of spaces, and names."""
    runs = [character * count for count in range(2, 9) for character in ("\n", "▁")]
    model = train(corpus, add_dummy_prefix=False, user_defined_symbols=["<tool>", "<b>", *runs])
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    spelled = [library.id_to_piece(i) for i in range(library.vocab_size())]
    kinds = [4 if piece in ("<tool>", "<b>", *runs) else kind(library, i) for i, piece in enumerate(spelled)]
    pieces = [piece.replace("▁", " ") if of == 4 else piece for piece, of in zip(spelled, kinds, strict=True)]
    keys = {"tokens": pieces, "token_type": kinds, "add_space_prefix": False}
    keys["scores"] = [-1000.0 if of == 4 else library.get_score(i) for i, of in enumerate(kinds)]
    texts = ["a<tool>b <tool> c", "<b>bold<b>", "\n\n\nx\n\n", "x" + " " * 20 + "y  z", "\n" * 21]
    for ours, _ in (from_model(model), from_pieces(library, **keys)):
        assert_equal(ours, library, [*corpus, *texts])


def test_without_bytes_an_unknown_character_is_unknown(from_model, corpus):
    model = train(corpus, byte_fallback=False, vocab_size=500)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours, _ = from_model(model)
    for text in ["plain text", "ꙮꙮ strange ꙮ"]:
        assert ours.encode(text).ids == library.encode(text)
    assert 0 in ours.encode("ꙮ").ids


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model_type": "unigram", "vocab_size": 400}, "not of type BPE but Unigram"),
        ({"model_type": "char", "vocab_size": 400}, "not of type BPE but CHAR"),
        ({"normalization_rule_name": "nmt_nfkc"}, r"normalizes text \(nmt_nfkc\)"),
        ({"treat_whitespace_as_suffix": True}, "spaces behind words"),
    ],
)
def test_other_models_are_refused(from_model, corpus, options, match):
    with pytest.raises(UnsupportedError, match=match):
        from_model(train(corpus, **options))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_model_is_read_or_refused(model, tmp_path_factory, data):
    at = data.draw(st.integers(0, len(model) - 1))
    new = data.draw(st.binary(max_size=4))
    end = data.draw(st.sampled_from([at, at + len(new), len(model)]))
    path = tmp_path_factory.getbasetemp() / "damaged.model"
    path.write_bytes(model[:at] + new + model[end:])
    try:
        document = read_model(path)
    except CheckpointError:
        return
    assert document["model"]["type"] == "BPE"


def test_merges_are_ranked_by_the_score_of_what_they_make():
    pieces, scores = ["a", "b", "c", "ab", "bc", "abc"], [0.0, 0.0, 0.0, -2.0, -1.0, -3.0]
    assert merges_from_scores(pieces, scores) == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


def test_an_endless_piece_is_refused():
    with pytest.raises(CheckpointError, match="piece of 100000 characters"):
        merges_from_scores(["a" * 100_000], [0.0])
