"""Tokenizers from GGUF metadata encode as the originals; what cannot be served is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_cuts import CUTS
from tokenizers import Tokenizer

from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.text import write_text_files
from pagelet.exporter.text.document import byte_level_document
from pagelet.exporter.text.gguf import read_metadata
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
        ({"model": "t5"}, UnsupportedError, r"'t5' \(Unigram\)"),
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


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def from_metadata(architecture: str, **keys: Any) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    source = read_metadata({"general.architecture": architecture, **metadata}, "x")
    return Tokenizer.from_str(json.dumps(source.tokenizer))


def small(*words: str) -> dict[str, Any]:
    """SentencePiece keys: "<unk>" and "<|user|>", the bytes, then the words by rank."""
    tokens = ["<unk>", "<|user|>", *BYTES, *words]
    types = [2, 3, *[6] * 256, *[1] * len(words)]
    scores = [-float(rank) for rank in range(len(tokens))]
    return {"tokens": tokens, "token_type": np.array(types), "scores": np.array(scores, np.float32)}


def test_phi3s_markup_takes_the_whitespace_behind_it_away():
    keys = {"model": "llama", **small("▁", "H", "i", "Hi", "▁Hi")}
    phi = from_metadata("phi3", **keys)
    assert [phi.id_to_token(i) for i in phi.encode("<|user|>\n Hi").ids] == ["<|user|>", "▁Hi"]
    assert from_metadata("llama", **keys).encode("<|user|>\nHi").tokens == ["<|user|>", "▁", "<0x0A>", "Hi"]


def test_gemma4_merges_as_its_file_says():
    words = small("▁", "H", "i", "▁H", "Hi", "▁▁", "<|tool_call>", "\n", "\n\n")
    words["token_type"][words["tokens"].index("<|tool_call>")] = 4
    merges = ["▁ ▁", "H i", "▁ H", "\n \n"]
    ours = from_metadata("gemma4", model="gemma4", merges=merges, **words)
    assert ours.encode("Hi  Hi\n\né<|tool_call>").tokens == [
        *("Hi", "▁▁", "Hi", "\n\n", "<0xC3>", "<0xA9>", "<|tool_call>"),
    ]
    assert ours.decode(ours.encode(" Hi é").ids) == " Hi é"
    assert all(token.special for token in ours.get_added_tokens_decoder().values())


def test_tokens_that_fill_gaps_are_not_found_in_text(trained):
    keys = gguf_keys(trained("gpt-2"), "gpt-2")
    gap = f"[PAD{len(keys['tokens'])}]"
    keys |= {"tokens": [*keys["tokens"], gap, "[PAD7]"], "token_type": [*keys["token_type"], 4, 4]}
    keys["token_type"] = np.array(keys["token_type"])
    ours = from_metadata("llama", **keys)
    assert gap not in ours.encode(f"a {gap}").tokens
    assert "[PAD7]" in ours.encode("a [PAD7]").tokens


def test_a_gpt_neox_file_may_lack_the_name(trained):
    keys = gguf_keys(trained("olmo"), "olmo")
    keys["token_type"] = np.array(keys["token_type"])
    del keys["pre"]
    assert from_metadata("gptneox", **keys).encode("e\u0301").ids == trained("olmo").encode("é").ids
