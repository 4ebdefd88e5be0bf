"""Safetensors folders: what the safetensors package writes is what is read, and faults are named."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.text import write_text_files
from pagelet.exporter.text.generation import read_generation
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.weight_shapes import source_name, weight_shapes


def names(spec: Any, role: str) -> str:
    return source_name(role, spec.row.names)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_weight_is_read_exactly(write_folder, weights, spec, dtype):
    folder = write_folder({role: array.astype(dtype) for role, array in weights.items()})
    with open_checkpoint(folder) as checkpoint:
        assert list(checkpoint.weights) == [role for role, _ in weight_shapes(spec)]
        for role, array in weights.items():
            read = checkpoint.read(role)
            assert read.dtype == np.float32
            np.testing.assert_array_equal(read, array.astype(dtype).astype(np.float32))
            assert checkpoint.read_blocks(role) is None


def test_pieces_join_to_the_whole(write_folder, weights):
    with open_checkpoint(write_folder(weights)) as checkpoint:
        pieces = [checkpoint.read("embedding.weight", at, min(at + 7, 48)) for at in range(0, 48, 7)]
        np.testing.assert_array_equal(np.concatenate(pieces), weights["embedding.weight"])
        np.testing.assert_array_equal(
            checkpoint.read("final_norm.weight", 5, 9), weights["final_norm.weight"][5:9]
        )


def test_one_row_costs_the_memory_of_one_row(write_folder, weights):
    with open_checkpoint(write_folder(weights)) as checkpoint:
        checkpoint.read("layers.0.mlp.gate.weight", 0, 1)
        tracemalloc.start()
        checkpoint.read("layers.0.mlp.gate.weight", 100, 101)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8 * 1024  # the row has 1 KiB, the tensor 256 KiB


def shard(folder: Path, spec: Any, weights: Any, *, index: bool) -> None:
    (folder / "model.safetensors").unlink()
    parts: list[dict[str, Any]] = [{}, {}, {}]
    for number, (role, array) in enumerate(weights.items()):
        parts[number % 3][names(spec, role)] = array
    weight_map = {}
    for number, part in enumerate(parts):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_checkpoint(write_folder, weights, spec, index):
    folder = write_folder(weights)
    shard(folder, spec, weights, index=index)
    with open_checkpoint(folder) as checkpoint:
        for role, array in weights.items():
            np.testing.assert_array_equal(checkpoint.read(role), array)
        description = checkpoint.describe()
    assert description["kind"] == "safetensors"
    assert description["name"] == folder.name
    assert description["files"] == {p.name: p.stat().st_size for p in sorted(folder.glob("*.safetensors"))}
    assert description["dtypes"] == {"F32": len(weights)}


def test_faults_of_shards_are_named(write_folder, weights, spec):
    folder = write_folder(weights)
    shard(folder, spec, weights, index=True)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]

    def refuses(weight_map: dict[str, Any], match: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(folder)

    refuses(good | {"extra.weight": "model-00001-of-00003.safetensors"}, "'extra.weight' is in model-00001")
    refuses(good | {"model.norm.weight": "elsewhere.safetensors"}, r"elsewhere.safetensors is missing")
    refuses(good | {"model.norm.weight": "../outside.safetensors"}, "not a file of the folder")
    refuses(good | {"model.norm.weight": "/etc/passwd"}, "not a file of the folder")
    refuses(good | {"model.norm.weight": 3}, "'model.norm.weight' is 3; expected str")
    index.unlink()
    save_file({"model.norm.weight": weights["final_norm.weight"]}, folder / "copy.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' is in copy.safetensors and in model-"):
        open_checkpoint(folder)


def test_missing_unexpected_and_misshapen_tensors_are_named_together(write_folder, weights, spec):
    named = {names(spec, role): array for role, array in weights.items()}
    folder = write_folder(weights)
    del named["model.layers.1.mlp.up_proj.weight"]
    named["surplus.weight"] = weights["final_norm.weight"]
    named["model.norm.weight"] = weights["final_norm.weight"][:8]
    named["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(32, np.float32)
    save_file(named, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight is missing" in message
    assert "surplus.weight is unexpected" in message
    assert "model.norm.weight has shape [8], expected [256]" in message
    assert "inv_freq" not in message
    assert "\n" not in message


def test_a_known_leftover_is_ignored_and_reported(write_folder, weights, spec):
    named = {names(spec, role): array for role, array in weights.items()}
    folder = write_folder(weights)
    leftover = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(named | {leftover: np.zeros(32, np.int64)}, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.unused == (leftover,)


def test_other_dtypes_are_refused_by_name(write_folder, weights, spec):
    folder = write_folder(weights)
    named = {names(spec, role): torch.from_numpy(array.copy()) for role, array in weights.items()}
    named["model.norm.weight"] = named["model.norm.weight"].to(torch.float8_e4m3fn)
    save_torch(named, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.norm.weight has dtype F8_E4M3, which cannot be read"):
        open_checkpoint(folder)


def test_a_declared_tie_is_believed_only_if_it_is_true(write_folder, weights):
    equal = weights | {"head.weight": weights["embedding.weight"]}
    with open_checkpoint(write_folder(equal, tie_word_embeddings=True)) as checkpoint:
        assert checkpoint.spec.tie_embeddings
        assert checkpoint.unused == ("lm_head.weight",)
        assert "head.weight" not in checkpoint.weights
    other = weights["embedding.weight"].copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(9))
    with open_checkpoint(
        write_folder(weights | {"head.weight": other}, tie_word_embeddings=True)
    ) as checkpoint:
        assert not checkpoint.spec.tie_embeddings
        assert "lm_head.weight differs" in checkpoint.notes[0]
        np.testing.assert_array_equal(checkpoint.read("head.weight"), other)


def test_a_tied_head_may_be_absent_and_an_untied_one_may_not(write_folder, weights):
    body = {role: array for role, array in weights.items() if role != "head.weight"}
    with open_checkpoint(write_folder(body, tie_word_embeddings=True)) as checkpoint:
        assert checkpoint.spec.tie_embeddings
        assert checkpoint.notes == ()
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing"):
        open_checkpoint(write_folder(body))


def test_a_truncated_file_is_named(write_folder, weights):
    folder = write_folder(weights)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated"):
        open_checkpoint(folder)


def header_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(start: int, stop: int, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "'a' and 'b' overlap"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), "leave a hole"),
        ({"a": entry(4, 8)}, bytes(8), "unused bytes before tensor 'a'"),
        ({"a": entry(0, 4)}, bytes(8), "its header describes"),
        ({"a": entry(0, 8)}, bytes(8), r"F32 \[1\] has 4 bytes"),
        ({"a": entry(0, 0, [1 << 39, 1 << 39])}, b"", "takes bytes 0 to 0, but F32"),
        ({"a": entry(0, 4, [-1])}, bytes(4), "shape holds -1"),
        ({"a": entry(0, 4, [True])}, bytes(4), "shape holds True"),
        ({"a": entry(0, 4, dtype="F3")}, bytes(4), "dtype 'F3'"),
        ({"a": entry(0, 4) | {"more": 1}}, bytes(4), "unknown key 'more'"),
        ({"a": 5}, b"", "described by 5"),
        ([], b"", "holds a JSON list"),
        (b'{"a": 1, "a": 2}', b"", "'a' stands twice"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not UTF-8"),
    ],
)
def test_false_headers_are_refused(write_folder, weights, header, data, match):
    folder = write_folder(weights)
    header_file(folder / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("length", "match"), [(1 << 62, "claims a header"), (1000, "truncated"), (0, "not valid JSON")]
)
def test_a_false_header_length_is_refused(write_folder, weights, length, match):
    folder = write_folder(weights)
    header_file(folder / "model.safetensors", {}, length=length)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(folder)


def test_paths_that_hold_no_checkpoint_say_what_was_expected(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is empty"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="give its folder"):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickled_weights_are_never_loaded(tmp_path, config, name):
    torch.save({"a": torch.zeros(1)}, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=r"never unpickled.*[Cc]onvert them to safetensors"):
            open_checkpoint(path)


def test_a_gguf_in_a_folder_is_pointed_at(tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"give one of them.*some\.gguf"):
        open_checkpoint(tmp_path)


def test_unknown_architectures_are_refused(write_folder, weights):
    with pytest.raises(UnsupportedError, match="OtherForCausalLM"):
        open_checkpoint(write_folder(weights, architectures=["OtherForCausalLM"]))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_opened(write_folder, weights, name, kind):
    folder = write_folder(weights)
    path = folder / name
    path.unlink(missing_ok=True)
    make = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
    }
    make[kind]()
    with pytest.raises(CheckpointError, match=f"{name} is no regular file"), open_checkpoint(folder):
        read_generation(folder / "generation_config.json")


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"])
def test_text_files_that_are_pipes_are_refused(write_folder, weights, tmp_path, name):
    folder = write_folder(weights)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(Tokenizer(BPE({"a": 0}, [])).to_str())
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=f"{name} is no regular file"),
    ):
        write_text_files(checkpoint, tmp_path / "out")


def test_linked_files_of_a_download_cache_are_read(write_folder, weights, tmp_path):
    folder = write_folder(weights)
    store = tmp_path / "store"
    store.mkdir()
    (folder / "model.safetensors").rename(store / "blob")
    (folder / "model.safetensors").symlink_to(store / "blob")
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("head.weight"), weights["head.weight"])
