"""Tokenizers rebuilt from what a GGUF file says equal the published tokenizer.json; `make tokenizers`."""

import json
import random
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vocabularies import LLAMA_CPP, PUBLISHED, fetched, gguf_metadata, published

from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.exporter.checkpoint.gguf_header import read_header
from pagelet.exporter.text.gguf import read_metadata
from pagelet.models.manifest import TextSettings
from pagelet.models.text import Tokenizer
from pagelet.models.text.control import is_markup
from pagelet.models.text.stream import TextStream

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data"
CORPUS: list[str] = json.loads((DATA / "tokenizer_corpus.json").read_text(encoding="utf-8"))
LONG = ["a" * 10_000, "ab" * 5_000, "z😀" * 2_000, "9" * 10_000, "語" * 5_000, "\n" * 3_000, " " * 3_000]
KINDS = {**PUBLISHED, "gemma3 by merges": ("gemma4", "")}
# Vocabularies of llama.cpp with the ids that it expects; none are here for kinds that are refused.
EXPECTED = [
    *("command-r", "deepseek-coder", "gemma-4", "gpt-2", "llama-bpe", "llama-spm"),
    *("mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
]


@dataclass
class Pair:
    """Ours, from GGUF metadata, and the published one."""

    ours: Tokenizer
    theirs: tokenizers.Tokenizer
    markup: list[str]
    control: set[str]
    unmarked: set[str]  # looks like markup, but is not special in the file


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Pair:
    name, (model, pre) = request.param.split()[0], KINDS[request.param]
    document = published(name)
    if model == "gemma4":  # it declares its special tokens only
        declared = [token for token in document["added_tokens"] if token["special"]]
        document = {**document, "added_tokens": declared}
    keys = {"add_space_prefix": False} if name == "gemma3" else {}
    special = {token["content"] for token in document["added_tokens"] if token["special"]}
    looks = {token["content"] for token in document["added_tokens"] if is_markup(token["content"])}
    rebuilt = read_metadata(gguf_metadata(document, model, pre, **keys), name).tokenizer
    return Pair(
        Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(rebuilt)), TextSettings()),
        tokenizers.Tokenizer.from_str(json.dumps(document)),
        [token["content"] for token in document["added_tokens"]],
        special | looks,
        looks - special,
    )


def assert_equal(pair: Pair, text: str) -> None:
    ids = pair.theirs.encode(text, add_special_tokens=False).ids
    assert pair.ours.encode(text, parse_special=True) == ids
    for skip in (True, False):
        assert pair.ours.decode(ids, skip_special=skip) == pair.theirs.decode(ids, skip_special_tokens=skip)


def test_the_corpus_has_the_published_ids_and_texts(pair: Pair) -> None:
    for text in [*CORPUS, *LONG, "".join(CORPUS)]:
        assert_equal(pair, text)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_text_has_the_published_ids(pair: Pair, data: st.DataObject) -> None:
    pieces = st.one_of(st.text(), st.sampled_from(CORPUS), st.sampled_from(pair.markup[:100]))
    assert_equal(pair, "".join(data.draw(st.lists(pieces, max_size=8))))


def test_markup_in_raw_text_is_text(pair: Pair) -> None:
    """Control tokens are never made by raw text; other tokens that were added always are."""
    control = {pair.theirs.token_to_id(token) for token in pair.markup if token in pair.control}
    pair.theirs.encode_special_tokens = True
    for text in [*CORPUS, "x".join(pair.markup[:300]), "".join(pair.markup[-300:])]:
        ids = pair.ours.encode(text)
        assert not control - {pair.theirs.token_to_id("<unk>")} & set(ids)
        if not any(token in text for token in pair.unmarked):
            assert ids == pair.theirs.encode(text, add_special_tokens=False).ids
    pair.theirs.encode_special_tokens = False


def test_a_stream_shows_what_decode_shows(pair: Pair) -> None:
    rng = random.Random(5)
    ids_in_use = sorted(pair.theirs.get_vocab().values())
    sequences = [pair.ours.encode(text) for text in CORPUS]
    sequences += [rng.choices(ids_in_use, k=40) for _ in range(100)]
    # Cut inside characters: byte tokens and halves of emoji.
    sequences += [ids[1:-1] for text in CORPUS if len(ids := pair.ours.encode(text)) > 2]
    for ids in sequences:
        stream = TextStream(pair.ours)
        shown = "".join(map(stream.push, ids)) + stream.finish()
        assert shown == pair.ours.decode(ids)
        assert shown.count("\ufffd") or shown == pair.theirs.decode(ids)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_gguf_vocabulary_has_the_expected_ids(name: str) -> None:
    path = fetched(f"{LLAMA_CPP}/models") / f"ggml-vocab-{name}.gguf"
    document = read_metadata(metadata(path), name).tokenizer
    ours = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(document)), TextSettings())
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = Path(f"{path}.out").read_text().splitlines()
    assert len(texts) >= 46
    for text, line in zip(texts, expected, strict=False):  # an empty last text has no line of its own
        if name == "qwen35" and not unicodedata.is_normalized("NFC", text):
            continue  # llama.cpp does not compose characters, Qwen's own tokenizer does
        assert ours.encode(text, parse_special=True) == [int(token) for token in line.split()]


def metadata(path: Path) -> dict[str, Any]:
    file = SourceFile(path)
    try:
        return read_header(file).metadata
    finally:
        file.close()
