"""LoRA adapters merged at export, against the merge written down directly."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from safetensors.numpy import load_file, save_file

from pagelet.exporter import export
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.resume import export_key
from pagelet.models.errors import CheckpointError, PageletError, UnsupportedError
from pagelet.models.manifest import hash_file
from pagelet.models.weight_shapes import source_name

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": ["q_proj"]}
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def write_adapter(folder: Path, tensors: Tensors, prefix: str = "base_model.model.", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(
        {prefix + name: array.copy(order="C") for name, array in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def factors(module: str, outputs: int, inputs: int, rank: int = 4) -> Tensors:
    rng = np.random.default_rng(len(module) + rank)
    return {
        f"{module}.lora_A.weight": rng.standard_normal((rank, inputs)).astype(np.float32),
        f"{module}.lora_B.weight": rng.standard_normal((outputs, rank)).astype(np.float32),
    }


def product(tensors: Tensors, module: str) -> Array:
    a, b = (tensors[f"{module}.lora_{factor}.weight"].astype(np.float64) for factor in "AB")
    return b @ a


@pytest.fixture
def base(write_folder: Callable[..., Path], weights: Tensors) -> Path:
    return write_folder(weights)


def named(weights: Tensors, spec: Any) -> Tensors:
    return {source_name(role, spec.row.names): array for role, array in weights.items()}


def check(base: Path, adapter: Path, spec: Any, expected: Tensors) -> None:
    """Every weight, whole and in part; those that are not expected otherwise are the base's own."""
    with open_checkpoint(base, adapter) as merged, open_checkpoint(base) as plain:
        for role, info in plain.weights.items():
            name = source_name(role, spec.row.names)
            for start, stop in ((0, info.shape[0]), (3, 7)):
                values = merged.read(role, start, stop)
                assert values.dtype == np.float32
                if name in expected:
                    # Sums of some products of numbers near 10, in float32.
                    np.testing.assert_allclose(values, expected[name][start:stop], rtol=1e-5, atol=2e-5)
                else:
                    np.testing.assert_array_equal(values, plain.read(role, start, stop))


@pytest.mark.parametrize(
    ("changes", "q_scale", "down_scale", "q_rank"),
    [
        ({}, 6 / 4, 6 / 4, 4),
        ({"use_rslora": True}, 6 / 2, 6 / 2, 4),
        ({"rank_pattern": {"q_proj": 9}}, 6 / 9, 6 / 4, 9),
        ({"rank_pattern": {"self_attn.q_proj": 9}, "use_rslora": True}, 6 / 3, 6 / 2, 9),
        ({"alpha_pattern": {"q_proj": 2, "proj": 100}}, 2 / 4, 6 / 4, 4),  # "proj" is the end of no name
        ({"alpha_pattern": {"model.layers.1.self_attn.q_proj": 1}}, 1 / 4, 6 / 4, 4),
        ({"fan_in_fan_out": True}, 6 / 4, 6 / 4, 4),
    ],
)
def test_lora(
    base: Path,
    tmp_path: Path,
    weights: Tensors,
    spec: Any,
    changes: dict[str, Any],
    q_scale: float,
    down_scale: float,
    q_rank: int,
) -> None:
    tensors = factors(Q, 256, 256, q_rank) | factors(DOWN, 256, 256)
    original = named(weights, spec)
    expected = {
        Q + ".weight": original[Q + ".weight"] + q_scale * product(tensors, Q),
        DOWN + ".weight": original[DOWN + ".weight"] + down_scale * product(tensors, DOWN),
    }
    check(base, write_adapter(tmp_path / "lora", tensors, **changes), spec, expected)


@pytest.mark.parametrize("suffix", ["lora_magnitude_vector", "lora_magnitude_vector.weight"])
def test_dora(base: Path, tmp_path: Path, weights: Tensors, spec: Any, suffix: str) -> None:
    magnitude = np.random.default_rng(5).uniform(0.5, 2, 256).astype(np.float32)
    tensors = factors(Q, 256, 256)
    merged = named(weights, spec)[Q + ".weight"] + 6 / 4 * product(tensors, Q)
    merged *= (magnitude / np.sqrt(np.square(merged).sum(axis=1)))[:, None]
    adapter = write_adapter(tmp_path / "dora", tensors | {f"{Q}.{suffix}": magnitude}, use_dora=True)
    check(base, adapter, spec, {Q + ".weight": merged})


def test_an_embedding(base: Path, tmp_path: Path, weights: Tensors, spec: Any) -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((4, 48)), rng.standard_normal((256, 4))
    name = "model.embed_tokens"
    tensors = {
        f"{name}.lora_embedding_A": a.astype(np.float32),
        f"{name}.lora_embedding_B": b.astype(np.float32),
    }
    expected = named(weights, spec)[name + ".weight"] + 6 / 4 * (b @ a).T
    check(base, write_adapter(tmp_path / "lora", tensors), spec, {name + ".weight": expected})


@pytest.mark.parametrize("wrapper", ["", ".modules_to_save"])
def test_modules_that_are_replaced(
    base: Path, tmp_path: Path, spec: Any, wrapper: str, weights: Tensors
) -> None:
    head = np.random.default_rng(7).standard_normal((48, 256)).astype(np.float16)
    norm = np.random.default_rng(8).standard_normal(256).astype(np.float32)
    tensors = {f"lm_head{wrapper}.weight": head, f"model.norm{wrapper}.weight": norm} | factors(Q, 256, 256)
    expected = {
        "lm_head.weight": head,
        "model.norm.weight": norm,
        Q + ".weight": named(weights, spec)[Q + ".weight"] + 6 / 4 * product(tensors, Q),
    }
    adapter = write_adapter(tmp_path / "lora", tensors, modules_to_save=["lm_head", "norm"])
    check(base, adapter, spec, expected)


def test_a_base_layer_of_the_adapter_comes_before_its_factors(base: Path, tmp_path: Path, spec: Any) -> None:
    own = np.random.default_rng(9).standard_normal((256, 256)).astype(np.float32)
    tensors = factors(DOWN, 256, 256) | {DOWN + ".base_layer.weight": own}
    expected = own + 6 / 4 * product(tensors, DOWN)
    check(base, write_adapter(tmp_path / "lora", tensors), spec, {DOWN + ".weight": expected})


def test_biases_are_replaced(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    source = make_llama(attention_bias=True)
    bias = np.arange(64, dtype=np.float32)
    adapter = write_adapter(tmp_path / "lora", {Q + ".base_layer.bias": bias}, bias="lora_only")
    with open_checkpoint(source, adapter) as merged:
        np.testing.assert_array_equal(merged.read("layers.1.attention.q.bias", 2, 60), bias[2:60])


def test_what_is_touched_has_no_codes_of_its_own(
    write_gguf: Callable[..., Path], tmp_path: Path, weights: Tensors, spec: Any
) -> None:
    adapter = write_adapter(tmp_path / "lora", tensors := factors(Q, 256, 256))
    path = write_gguf(weights, "Q4_1")
    with open_checkpoint(path, adapter) as merged, open_checkpoint(path) as plain:
        assert merged.read_blocks("layers.1.attention.q.weight") is None
        assert merged.obstacle("layers.1.attention.q.weight") == "an adapter is merged into them"
        assert merged.read_blocks("layers.1.attention.k.weight") is not None
        assert merged.obstacle("layers.1.attention.k.weight") == ""
        assert merged.weights["layers.1.attention.q.weight"].dtype == "Q4_1+LoRA"
        # The rows of q, which GGUF permutes, are in the adapter's order.
        expected = plain.read("layers.1.attention.q.weight") + 6 / 4 * product(tensors, Q)
        np.testing.assert_allclose(merged.read("layers.1.attention.q.weight"), expected, rtol=1e-5, atol=2e-5)


def test_a_tensor_in_anothers_place_is_not_adapted(base: Path, tmp_path: Path, weights: Tensors) -> None:
    adapter = write_adapter(tmp_path / "lora", factors(Q, 256, 256))
    with open_checkpoint(base, adapter) as merged:
        merged.use("layers.1.attention.q.weight", merged.weights["layers.0.attention.q.weight"])
        values = merged.read("layers.1.attention.q.weight")
        np.testing.assert_array_equal(values, weights["layers.0.attention.q.weight"])


def test_an_export_names_its_adapter(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    source = make_llama()
    tensors = factors(Q, 64, 64)
    adapter = write_adapter(tmp_path / "lora", tensors)
    options = uncertified(weights="fp32", cache_type="f32", adapter=adapter)
    manifest = export(source, tmp_path / "b", options)
    about = manifest.source["adapter"]
    assert about["name"] == "lora"
    assert about["sha256"] == hash_file(adapter / "adapter_model.safetensors")
    assert (about["settings"]["rank"], about["settings"]["alpha"]) == (4, 6)
    by_hand = make_llama()
    merged = load_file(source / "model.safetensors")
    merged[Q + ".weight"] = (merged[Q + ".weight"] + 6 / 4 * product(tensors, Q)).astype(np.float32)
    save_file(merged, by_hand / "model.safetensors")
    export(by_hand, tmp_path / "c", replace(options, adapter=None))
    files = [np.fromfile(tmp_path / name / "model.weights", np.float32) for name in "bc"]
    # One product in float32, the other in float64 and then rounded.
    np.testing.assert_allclose(*files, rtol=1e-5, atol=1e-5)


def test_another_adapter_is_another_export(base: Path, tmp_path: Path) -> None:
    keys = set()
    tensors = factors(Q, 256, 256)
    for changes, more in (({}, {}), ({"lora_alpha": 7}, {}), ({}, factors(DOWN, 256, 256))):
        adapter = write_adapter(tmp_path / "lora", tensors | more, **changes)
        with open_checkpoint(base, adapter) as merged:
            keys.add(export_key(merged, uncertified(adapter=adapter)))
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
        ({"target_parameters": ["x"]}, "target_parameters is"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"rotation": "hadamard"}, "rotation is 'hadamard'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern has"),
    ],
)
def test_settings_that_are_not_known(
    base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(base, write_adapter(tmp_path / "lora", factors(Q, 256, 256), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r is 0; expected a rank"),
        ({"r": 10**9}, "r is 1000000000"),
        ({"r": 5}, r"q_proj.lora_A.weight is F32 \[4, 256\]; expected F32 or F16 or BF16 \[5, 256\]"),
        ({"lora_alpha": "6"}, "'lora_alpha' is '6'"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e.300"),
        ({"use_dora": True}, "q_proj.lora_magnitude_vector is missing"),
        ({"use_rslora": 1}, "'use_rslora' is 1"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names 'lm_head', but no tensor"),
        ({"alpha_pattern": [1]}, "alpha_pattern is .1."),
    ],
)
def test_settings_that_do_not_fit(base: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(base, write_adapter(tmp_path / "lora", factors(Q, 256, 256), **changes))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            factors("model.layers.7.self_attn.q_proj", 256, 256),
            r"layers.7.self_attn.q_proj.lora_A.* no weight",
        ),
        (factors("model.layers.1.self_attn.qkv_proj", 256, 256), r"qkv_proj.lora_A.* matches no weight"),
        (factors("model.norm", 256, 256), r"model.norm.weight is \[256\]; factors"),
        ({Q + ".lora_A.weight": np.ones((4, 256), np.float32)}, "q_proj.lora_B.weight is missing"),
        (factors(Q, 255, 256), r"lora_B.weight is F32 \[255, 4\]; expected F32 or F16 or BF16 \[256, 4\]"),
        (
            factors(Q, 256, 256) | {Q + ".lora_magnitude_vector": np.ones(256, np.float32)},
            "lora_magnitude_vector is not expected beside the settings",
        ),
        ({"lm_head.weight": np.ones((49, 256), np.float32)}, r"lm_head.weight is F32 \[49, 256\]"),
        ({}, "no tensor matches"),
    ],
)
def test_tensors_of_another_model(base: Path, tmp_path: Path, tensors: Tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(base, write_adapter(tmp_path / "lora", tensors))


def test_names_without_the_prefix_are_foreign(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora", factors(Q, 256, 256), prefix="")
    with pytest.raises(CheckpointError, match="matches no weight"):
        open_checkpoint(base, adapter)


def test_an_embedding_that_is_the_head_too(
    write_folder: Callable[..., Path], tmp_path: Path, weights: Tensors
) -> None:
    tied = {role: array for role, array in weights.items() if role != "head.weight"}
    base = write_folder(tied, tie_word_embeddings=True)
    tensors = {"model.embed_tokens.weight": weights["embedding.weight"]}
    with pytest.raises(UnsupportedError, match="shares with its head"):
        open_checkpoint(base, write_adapter(tmp_path / "lora", tensors))


def test_folders_that_are_no_adapters(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora", factors(Q, 256, 256))
    with pytest.raises(CheckpointError, match="is no folder"):
        open_checkpoint(base, adapter / "adapter_config.json")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        open_checkpoint(base, adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(PageletError, match="cannot be opened"):
        open_checkpoint(base, adapter)
