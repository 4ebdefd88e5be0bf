"""Text files of Hugging Face folders: taken as they are, or built from older files to the same effect."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.text import write_text_files
from pagelet.models.errors import CheckpointError
from pagelet.models.manifest import TextSettings


@pytest.fixture
def from_folder(write_folder: Any, vocabulary_960: Any, tmp_path: Path) -> Callable[..., Any]:
    """Export the text files of a folder that holds these files beside its weights."""

    def build(files: dict[str, Any], **config: Any) -> tuple[Tokenizer, TextSettings, dict[str, Any], Path]:
        folder = write_folder(vocabulary_960, vocab_size=960, tie_word_embeddings=True, **config)
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8", newline="")
        out = tmp_path / "bundle"
        out.mkdir(exist_ok=True)
        with open_checkpoint(folder) as checkpoint:
            settings, generation = write_text_files(checkpoint, out)
        return Tokenizer.from_file(str(out / "tokenizer.json")), settings, generation, out

    return build


def test_tokenizer_json_is_taken_as_it_is(from_folder, trained):
    original = trained("qwen2")
    document = json.loads(original.to_str())
    _, _, _, out = from_folder({"tokenizer.json": document})
    assert json.loads((out / "tokenizer.json").read_text(encoding="utf-8")) == document
    assert not (out / "chat_template.jinja").exists()


def test_a_length_limit_is_taken_off(from_folder, trained, assert_same_tokens):
    original = trained("gpt-2")
    original.enable_truncation(4)
    original.enable_padding(length=8)
    ours, *_ = from_folder({"tokenizer.json": original.to_str()})
    original.no_truncation()
    original.no_padding()
    assert_same_tokens(ours, original)


def older_files(original: Tokenizer) -> dict[str, Any]:
    model = json.loads(original.to_str())["model"]
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""])
    return {"vocab.json": model["vocab"], "merges.txt": merges}


@pytest.mark.parametrize(("name", "pre"), [("GPT2Tokenizer", "gpt-2"), ("Qwen2TokenizerFast", "qwen2")])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_vocabulary_and_merges_encode_as_transformers_does(
    from_folder, name, pre, newline, trained, assert_same_tokens, specials, corpus
):
    import transformers

    original = trained(pre)
    files = older_files(original)
    declared = {
        str(i): {"content": token, "special": token != "<tool>"}
        for i, token in enumerate([*specials, "<tool>"])
    }
    kind = getattr(transformers, name.removesuffix("Fast"))
    merges = [tuple(line.split()) for line in files["merges.txt"].split("\n")[1:-1]]
    theirs = kind(vocab=files["vocab.json"], merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": specials})
    theirs.add_tokens(["<tool>"])
    files["merges.txt"] = files["merges.txt"].replace("\n", newline)
    config = {"tokenizer_class": name, "added_tokens_decoder": declared, "eos_token": "<|im_end|>"}
    ours, settings, _, _ = from_folder(files | {"tokenizer_config.json": config})
    assert_same_tokens(ours, original)
    for text in corpus:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False)
    assert settings.eos_token_ids == (2,)


def test_named_tokens_of_the_configs_are_special_without_a_declaration(from_folder, trained):
    files = older_files(trained("gpt-2")) | {"added_tokens.json": {"<tool>": 3}}
    ours, settings, _, _ = from_folder(files, bos_token_id=0, eos_token_id=[2, 1])
    assert ours.encode("<|im_end|>").ids == [2]
    assert ours.encode("<tool>").ids == [3]
    assert settings == TextSettings(
        0, (2, 1), False, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    )


def test_all_ends_are_united_and_sampling_defaults_kept(from_folder, trained):
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1, "do_sample": True}
    files = {
        "tokenizer.json": trained("gpt-2").to_str(),
        "tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}, "bos_token": None},
        "special_tokens_map.json": {"bos_token": "<|im_start|>"},
        "generation_config.json": sampling | {"eos_token_id": [2, 0], "max_length": 20, "min_p": None},
    }
    _, settings, generation, _ = from_folder(files, eos_token_id=9)
    assert settings.eos_token_ids == (2, 9, 0)
    assert settings.bos_token_id is None  # said to be none, which counts more than the older file
    assert generation == sampling


@pytest.mark.parametrize(("flag", "expected"), [(None, True), (False, False), (True, True)])
def test_add_bos_is_what_the_post_processor_does_unless_a_flag_says(from_folder, flag, expected, trained):
    original = trained("gpt-2")
    original.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    config = {"bos_token": "<|endoftext|>"} | ({} if flag is None else {"add_bos_token": flag})
    files = {"tokenizer.json": original.to_str(), "tokenizer_config.json": config}
    assert from_folder(files)[1].add_bos is expected
    files["tokenizer.json"] = trained("gpt-2").to_str()
    assert from_folder(files)[1].add_bos is bool(flag)


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "inline"}}, "inline"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "D"),
        (
            {"tokenizer_config.json": {"chat_template": "inline"}, "chat_template.jinja": "ü\r\nfile"},
            "ü\r\nfile",
        ),
    ],
)
def test_the_chat_template_is_found(from_folder, files, expected, trained):
    *_, out = from_folder({"tokenizer.json": trained("gpt-2").to_str()} | files)
    assert (out / "chat_template.jinja").read_bytes().decode() == expected


def test_added_tokens_without_an_embedding_are_left_out(from_folder, trained):
    original = trained("gpt-2")
    document = json.loads(original.to_str())
    document["added_tokens"].append(document["added_tokens"][0] | {"id": 960, "content": "[PAD]"})
    ours, *_ = from_folder({"tokenizer.json": document})
    assert ours.token_to_id("[PAD]") is None


SMALLEST = {"vocab.json": {"a": 0}, "merges.txt": ""}


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "has no tokenizer"),
        ({"tokenizer.json": "{"}, r"tokenizer.json is not valid JSON"),
        ({"tokenizer.json": {"model": {}}}, r"no 'vocab'"),
        ({"tokenizer.json": {"model": {"vocab": {}}, "added_tokens": [1]}}, "added_tokens holds 1"),
        ({"tokenizer.json": {"model": {"vocab": {}}}}, "cannot be loaded"),
        ({"vocab.json": {"a": "b"}, "merges.txt": ""}, r"vocab.json: vocabulary: 'a' is 'b'"),
        ({"vocab.json": {"a": 960}, "merges.txt": ""}, "largest id is 960"),
        ({"vocab.json": {"a": 0}, "merges.txt": "a"}, r"merges.txt: the line 'a'"),
        (SMALLEST | {"added_tokens.json": {"<x>": 5}}, "has id 5, but 1 comes"),
        (SMALLEST | {"tokenizer_config.json": {"eos_token": "</s>"}}, "'</s>', which"),
        (SMALLEST | {"tokenizer_config.json": {"eos_token": 3}}, "eos_token is 3"),
        (SMALLEST | {"tokenizer_config.json": {"tokenizer_class": "X"}}, "'X' cannot"),
        (SMALLEST | {"generation_config.json": {"top_p": 2}}, "top_p is 2"),
        (SMALLEST | {"generation_config.json": {"top_k": 1.5}}, "top_k is 1.5"),
        (SMALLEST | {"generation_config.json": {"eos_token_id": "x"}}, "is 'x'"),
        ({"vocab.json": '{"\\ud800": 0}', "merges.txt": ""}, r"vocab.json is not valid JSON.*surrogates"),
    ],
)
def test_faults_name_their_file(from_folder, files, match):
    with pytest.raises(CheckpointError, match=match):
        from_folder(files)


def test_a_tokenizer_that_fails_only_when_it_encodes_is_refused(from_folder, trained):
    document = json.loads(trained("gpt-2").to_str())
    single = [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        from_folder({"tokenizer.json": document})


def test_a_file_that_is_too_large_is_not_read(from_folder, monkeypatch, trained):
    monkeypatch.setattr("pagelet.exporter.text.hf_document.MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"tokenizer.json has \d+ bytes; at most 1000"):
        from_folder({"tokenizer.json": trained("gpt-2").to_str()})
