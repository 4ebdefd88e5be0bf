"""Mistral's own SentencePiece and Tekken models, as mistral-common ships them; `make tokenizers`."""

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vocabularies import MISTRAL, fetched

from pagelet.exporter.text.gguf import read_metadata
from pagelet.exporter.text.sentencepiece import read_model
from pagelet.models.manifest import TextSettings
from pagelet.models.text import Tokenizer

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data"
CORPUS: list[str] = json.loads((DATA / "tokenizer_corpus.json").read_text(encoding="utf-8"))
PROTO = "tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"


def opened(document: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(document)), TextSettings())


@pytest.fixture(scope="module", params=PROTO)
def sentencepieces(request: pytest.FixtureRequest) -> tuple[Tokenizer, Any]:
    path = fetched(f"{MISTRAL}/{request.param}")
    return opened(read_model(path)), sentencepiece.SentencePieceProcessor(model_file=str(path))


def assert_same_pieces(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, library = pair
    ids = library.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == library.decode(ids)


def test_a_sentencepiece_model_encodes_the_corpus_as_the_library(sentencepieces: tuple[Any, Any]) -> None:
    for text in CORPUS:
        assert_same_pieces(sentencepieces, text)


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.one_of(st.text(), st.sampled_from(CORPUS)), max_size=6).map("".join))
def test_a_sentencepiece_model_encodes_any_text_as_the_library(
    sentencepieces: tuple[Any, Any], text: str
) -> None:
    assert_same_pieces(sentencepieces, text)


SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<SPECIAL_{i}>" for i in range(5, 1000))]


class Tekken:
    """The oracle: a piece is merged by the rank of its bytes, as tiktoken does it."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text(encoding="utf-8"))
        size = data["config"]["default_vocab_size"] - len(SPECIALS)
        self.tokens = [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"][:size]]
        self.ranks = {token: rank for rank, token in enumerate(self.tokens)}
        self._cut = pre_tokenizers.Split(Regex(data["config"]["pattern"]), "isolated")

    def encode(self, text: str) -> list[int]:
        pieces = [piece.encode() for piece, _ in self._cut.pre_tokenize_str(text)] if text else []
        return [self.ranks[part] + len(SPECIALS) for piece in pieces for part in self._merged(piece)]

    def _merged(self, piece: bytes) -> list[bytes]:
        if piece in self.ranks:
            return [piece]
        parts = [piece[i : i + 1] for i in range(len(piece))]
        while ranked := [
            (rank, at)
            for at, (left, right) in enumerate(pairwise(parts))
            if (rank := self.ranks.get(left + right)) is not None
        ]:
            at = min(ranked)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts

    def metadata(self) -> dict[str, Any]:
        """As converters write it: bytes as printable characters, each way to cut a token as a merge."""
        letters = bytes_to_unicode()
        spelled = ["".join(letters[byte] for byte in token) for token in self.tokens]
        known = {token: rank for rank, token in enumerate(spelled)}
        merges = []
        for token in spelled:
            cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
            cuts = [cut for cut in cuts if cut[0] in known and cut[1] in known]
            merges += [" ".join(cut) for cut in sorted(cuts, key=lambda cut: (known[cut[0]], known[cut[1]]))]
        kinds = np.array([3] * len(SPECIALS) + [1] * len(spelled), np.int32)
        keys = {"model": "gpt2", "pre": "tekken", "merges": merges, "bos_token_id": 1}
        keys |= {"tokens": SPECIALS + spelled, "token_type": kinds}
        return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def test_tekken_encodes_by_the_rank_of_bytes() -> None:
    tekken = Tekken(fetched(f"{MISTRAL}/tekken_240911.json"))
    source = read_metadata(tekken.metadata(), "tekken")
    assert source.add_bos
    ours = opened(source.tokenizer)
    for text in [*CORPUS, "".join(CORPUS), "straße " * 500]:
        ids = ours.encode(text)
        assert ids == tekken.encode(text)
        assert ours.decode(ids) == text
