"""Tokenizers from GGUF metadata encode as the originals; what cannot be served is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published_cuts import CUTS
from tokenizers import Tokenizer

from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.text import write_text_files
from pagelet.exporter.text.document import byte_level_document
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.manifest import TextSettings


def gguf_keys(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """The tokenizer's metadata as llama.cpp's converter writes it."""
    document = json.loads(tokenizer.to_str())
    tokens = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    kinds = {token["content"]: 3 if token["special"] else 4 for token in document["added_tokens"]}
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [kinds.get(token, 1) for token in tokens],
        "merges": [" ".join(pair) for pair in document["model"]["merges"]],
        "eos_token_id": 2,
    }


@pytest.fixture
def from_gguf(
    tmp_path: Path, write_gguf: Any, vocabulary_960: Any
) -> Callable[..., tuple[Tokenizer, TextSettings, Path]]:
    """Tokenizer and settings exported from a GGUF file with these tokenizer keys."""

    def build(keys: dict[str, Any], template: str | None = None) -> tuple[Tokenizer, TextSettings, Path]:
        metadata = {f"tokenizer__ggml__{key}": value for key, value in keys.items()}
        if template is not None:
            metadata["tokenizer__chat_template"] = template
        out = tmp_path / "bundle"
        out.mkdir(exist_ok=True)
        with open_checkpoint(write_gguf(vocabulary_960, **metadata)) as checkpoint:
            settings, generation = write_text_files(checkpoint, out)
        assert generation == {}
        return Tokenizer.from_file(str(out / "tokenizer.json")), settings, out

    return build


@pytest.mark.parametrize("pre", CUTS)
def test_a_gguf_tokenizer_encodes_as_the_original(from_gguf, pre, trained, assert_same_tokens, specials):
    original = trained(pre)
    ours, settings, _ = from_gguf(gguf_keys(original, pre))
    assert_same_tokens(ours, original)
    assert settings.eos_token_ids == (2,)
    assert settings.special_tokens == {"eos_token": "<|im_end|>"}
    assert not settings.add_bos
    assert {t.content: t.special for t in ours.get_added_tokens_decoder().values()} == dict.fromkeys(
        specials, True
    ) | {"<tool>": False}


def test_smollm_splits_digits_one_by_one(from_gguf, trained):
    ours, _, _ = from_gguf(gguf_keys(trained("smollm"), "smollm"))
    assert ours.encode("12345").tokens == ["1", "2", "3", "4", "5"]


def test_ends_begin_and_template_come_from_the_metadata(from_gguf, trained):
    keys = gguf_keys(trained("gpt-2"), "gpt-2")
    keys |= {
        "bos_token_id": 1,
        "eos_token_id": 0,
        "eot_token_id": 5,
        "add_bos_token": True,
        "padding_token_id": 0,
    }
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\r\n{% endfor %}"
    _, settings, out = from_gguf(keys, template)
    assert (out / "chat_template.jinja").read_bytes() == template.encode()
    assert settings.bos_token_id == 1
    assert settings.add_bos
    assert settings.eos_token_ids == (0, 5, 2)  # eos, eot, and the token that ends a turn in the template
    assert settings.special_tokens["pad_token"] == "<|endoftext|>"


def test_llama3_begins_with_bos_unless_told_otherwise(from_gguf, trained):
    keys = gguf_keys(trained("llama-bpe"), "llama-bpe") | {"bos_token_id": 0}
    assert from_gguf(keys)[1].add_bos
    assert not from_gguf(keys | {"add_bos_token": False})[1].add_bos


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"pre": "kimi-k2"},
            UnsupportedError,
            r"'kimi-k2' is not known \(known: command-r, dbrx",
        ),
        ({"pre": None}, UnsupportedError, "'default' is not known"),
        ({"model": "bert"}, UnsupportedError, "'bert'"),
        ({"model": None}, CheckpointError, r"no 'tokenizer.ggml.model'"),
        ({"merges": ["a b c"]}, CheckpointError, "not two tokens"),
        ({"merges": ["qqq zzz"]}, CheckpointError, "cannot be loaded"),
        ({"token_type": [1, 1]}, CheckpointError, "token_type has 2 values"),
        ({"eos_token_id": 5000}, CheckpointError, "eos_token is 5000"),
        ({"eot_token_id": 5000}, CheckpointError, "eos token 5000"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused(from_gguf, change, error, match, trained):
    keys = gguf_keys(trained("gpt-2"), "gpt-2") | change
    with pytest.raises(error, match=match):
        from_gguf({key: value for key, value in keys.items() if value is not None})


def test_a_token_that_stands_twice_is_refused(from_gguf, trained):
    keys = gguf_keys(trained("gpt-2"), "gpt-2")
    keys["tokens"][7] = keys["tokens"][6]
    with pytest.raises(CheckpointError, match="tokens 6 and 7 are both"):
        from_gguf(keys)


def test_smollm2_as_published(smollm2_gguf, tmp_path, corpus):
    with open_checkpoint(smollm2_gguf) as checkpoint:
        settings, generation = write_text_files(checkpoint, tmp_path)
    assert generation == {}
    assert settings.eos_token_ids == (2,)
    assert settings.bos_token_id == 1
    assert not settings.add_bos
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids[::4] == [1, 2]
    assert tokenizer.encode(" 12345").tokens == ["Ġ", "1", "2", "3", "4", "5"]
    for text in corpus:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert "im_start" in (tmp_path / "chat_template.jinja").read_text()


@pytest.mark.parametrize("odd", ["a b", "#version"])
def test_merges_are_read_back_whatever_their_tokens(odd: str) -> None:
    vocabulary = {token: i for i, token in enumerate([*sorted(set(odd + "xy")), "xy", odd, odd + "x"])}
    merges = [("x", "y"), (odd, "x")]
    for given in (merges[:1], merges):
        document = byte_level_document("gpt-2", vocabulary, given, [])
        model = json.loads(Tokenizer.from_str(json.dumps(document)).to_str())["model"]
        assert [tuple(pair) for pair in model["merges"]] == given
