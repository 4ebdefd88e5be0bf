"""A bundle is refused, before anything is loaded, when it is damaged, foreign or hostile."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagelet.models.config import spec_from_config
from pagelet.models.errors import BundleError
from pagelet.models.manifest import (
    VERSION,
    FileEntry,
    Manifest,
    Quantization,
    TensorEntry,
    TextSettings,
    check_files,
    hash_file,
    load_manifest,
)

SPEC = spec_from_config({
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True,
})  # fmt: skip
CONTENT = {"model.onnx": b"graph", "model.weights": b"weights" * 9, "tokenizer.json": b"{}"}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    manifest_of(tmp_path).save(tmp_path)
    return tmp_path


def manifest_of(folder: Path) -> Manifest:
    return Manifest(
        spec=SPEC,
        quantization=Quantization("int4", "rtn", 32),
        text=TextSettings(bos_token_id=1, eos_token_ids=(2, 3), special_tokens={"bos_token": "<s>"}),
        files={
            name: FileEntry(len(CONTENT[name]), hash_file(folder / name), weights=name == "model.weights")
            for name in CONTENT
        },
        tensors={"embedding": TensorEntry("int4", (100, 64), 4000, 32, exact=True)},
        source={"kind": "gguf", "name": "tiny.gguf"},
    )


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = bundle / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def rtx(data: dict[str, Any], gpu: dict[str, Any]) -> None:
    data.update(target="rtx", cache_type="f16", gpu=gpu)


def test_round_trip(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    assert manifest == manifest_of(bundle)
    check_files(bundle, manifest, weights=True)


OLD_SPEC = {
    "architecture": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_context": 64, "norm_epsilon": 1e-5,
    "rope": {"theta": 1e4, "rotary_dim": 16, "scaling": "none", "factor": 1.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position": 0, "frequency_divisors": []},
    "tie_embeddings": True, "attention_bias": False, "mlp_bias": False, "layer_windows": [],
}  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_older_manifests_describe_all_layers_at_once(version: int, bundle: Path) -> None:
    edit(bundle, lambda data: data.update(version=version, spec=OLD_SPEC))
    edit(bundle, lambda data: data.pop("gpu"))
    if version == 2:
        edit(bundle, lambda data: data.pop("certificate"))
    manifest = load_manifest(bundle)
    assert manifest == replace(manifest_of(bundle), version=version)
    assert manifest.to_json()["version"] == VERSION


def test_older_manifests_with_windows_and_biases(bundle: Path) -> None:
    old = OLD_SPEC | {"layer_windows": [16, 0], "attention_bias": True}
    edit(bundle, lambda data: data.update(version=3, spec=old))
    edit(bundle, lambda data: data.pop("gpu"))
    spec = load_manifest(bundle).spec
    assert [layer.window for layer in spec.layers] == [16, 0]
    assert spec.attention.bias
    assert spec.attention.output_bias
    assert not spec.mlp.bias


@pytest.mark.parametrize(
    "change", [{"num_layers": -1}, {"layer_windows": [1]}, {"head_dim": "x"}, {"rope": 3}]
)
def test_older_manifests_that_are_off(change: dict[str, Any], bundle: Path) -> None:
    edit(bundle, lambda data: data.update(version=3, spec=OLD_SPEC | change))
    with pytest.raises(BundleError):
        load_manifest(bundle)


def test_the_fingerprint_follows_graph_and_weights_only(bundle: Path) -> None:
    before = load_manifest(bundle).fingerprint
    edit(bundle, lambda data: data["files"]["tokenizer.json"].update(sha256="0" * 64))
    assert load_manifest(bundle).fingerprint == before
    edit(bundle, lambda data: data["files"]["model.weights"].update(sha256="0" * 64))
    assert load_manifest(bundle).fingerprint != before


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "a\\b", "C:x", "", ".", "a//b", "./a", "nul\0"]
)
def test_paths_that_leave_the_folder(bundle: Path, path: str) -> None:
    edit(bundle, lambda data: data["files"].update({path: {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(BundleError, match="file path"):
        load_manifest(bundle)


@pytest.mark.parametrize("path", ["x" * 256, "a/" + "é" * 128, "a/" * 600 + "a"])
def test_paths_that_are_too_long(bundle: Path, path: str) -> None:
    edit(bundle, lambda data: data["files"].update({path: {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(BundleError, match="is too long; expected at most 255 bytes per part"):
        load_manifest(bundle)


def test_the_file_systems_errors_name_the_file(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    long = replace(manifest, files={**manifest.files, "x" * 300: FileEntry(1, "0")})
    with pytest.raises(BundleError, match="xxx cannot be read: File name too long"):
        check_files(bundle, long)

    def vanish(_: int) -> None:
        (bundle / "tokenizer.json").unlink(missing_ok=True)

    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read: No such file"):
        check_files(bundle, manifest, on_bytes=vanish)


def test_a_link_out_of_the_folder(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "graph"
    outside.write_bytes(CONTENT["model.onnx"])
    (bundle / "model.onnx").unlink()
    (bundle / "model.onnx").symlink_to(outside)
    with pytest.raises(BundleError, match=r"model\.onnx links to a file outside"):
        check_files(bundle, load_manifest(bundle))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(version=6), "version 6; this pagelet reads versions 2 to 5: update"),
        (
            lambda data: data.update(version=1),
            "version 1; this pagelet reads versions 2 to 5: export it again",
        ),
        (lambda data: data.update(version=4), "unknown key 'gpu'"),
        (
            lambda data: data.update(target="toaster"),
            "target is 'toaster'; this pagelet knows cpu, cuda, rtx",
        ),
        (lambda data: data.update(target="rtx"), "settings of a GPU do not go with the target 'rtx'"),
        (lambda data: data.update(gpu={}), "settings of a GPU do not go with the target 'cpu'"),
        (lambda data: data.update(target="rtx", gpu={"engine": "e"}), "engine 'e' is not among its files"),
        (
            lambda data: data.update(target="rtx", gpu={"engine": "model.onnx"}),
            "is no engine of the target 'rtx'",
        ),
        (lambda data: data.update(target="rtx", gpu={}), "the target 'rtx' has no cache 'f32'"),
        (lambda data: data.update(target="cuda", cache_type="f16", gpu={"sms": [89]}), "are out of range"),
        (
            lambda data: rtx(data, gpu={"sms": [], "kernels": "k"}),
            "out of range",
        ),
        (
            lambda data: rtx(data, gpu={"sms": [89], "kernels": "k", "engine_sms": [86]}),
            "are out of range",
        ),
        (
            lambda data: rtx(data, gpu={"kernels": "../k"}),
            "'../k' leaves the bundle",
        ),
        (
            lambda data: rtx(data, gpu={"max_sequences": 0}),
            "are out of range",
        ),
        (
            lambda data: rtx(data, gpu={"activations": "f8"}),
            "are out of range",
        ),
        (lambda data: data.update(version=2), "unknown key 'certificate'"),
        (lambda data: data.update(certificate="x.json"), "certificate 'x.json' is not among its files"),
        (lambda data: data.update(version=0), "export it again"),
        (lambda data: data.update(version="1"), "'version' is '1'"),
        (lambda data: data.update(format="zip"), "not a pagelet manifest"),
        (lambda data: data.update(colour=1), "unknown key 'colour'"),
        (lambda data: data.pop("files"), "no 'files'"),
        (lambda data: data["files"].pop("model.onnx"), "graph 'model.onnx' is not among"),
        (lambda data: data["files"].update(x=3), "expected an object"),
        (lambda data: data["files"]["model.onnx"].update(size=3), "unknown key 'size'"),
        (lambda data: data["files"]["model.onnx"].update(bytes="5"), "'bytes' is '5'"),
        (lambda data: data.update(block_size=0), "block_size is 0"),
        (lambda data: data["spec"].update(layers=[]), "num_layers is 0"),
        (lambda data: data["spec"]["ropes"][0].update(scaling="spiral"), "spiral"),
        (lambda data: data["spec"]["ropes"][0].pop("theta"), "theta"),
        (lambda data: data["text"].update(eos_token_ids=[1, "2"]), "eos_token_ids"),
    ],
)
def test_a_manifest_that_is_off(
    bundle: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=message):
        load_manifest(bundle)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "null", '"x"'])
def test_not_json_of_ours(bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_text(text)
    with pytest.raises(BundleError):
        load_manifest(bundle)


def test_not_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a bundle"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("name", CONTENT)
def test_a_truncated_or_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).write_bytes(CONTENT[name][:-1])
    with pytest.raises(BundleError, match=name):
        check_files(bundle, load_manifest(bundle))
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing"):
        check_files(bundle, load_manifest(bundle))


def test_small_files_are_hashed_always_and_the_weights_when_asked(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    (bundle / "model.weights").write_bytes(CONTENT["model.weights"][::-1])
    check_files(bundle, manifest)
    with pytest.raises(BundleError, match=r"model\.weights does not have"):
        check_files(bundle, manifest, weights=True)
    (bundle / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(BundleError, match=r"tokenizer\.json does not have"):
        check_files(bundle, manifest)
