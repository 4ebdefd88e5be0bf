"""What the metadata of a GGUF file says is read, what it leaves out is known or refused."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.checkpoint.gguf_config import spec_from_metadata
from pagelet.exporter.checkpoint.gguf_families import FAMILIES
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.architectures import architecture_by_name
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.spec import ModelSpec

EMBEDDING = TensorInfo("token_embd.weight", (300, 64), "F32", 4 * 300 * 64, "m.gguf", 0)
_ROPE = "rope.scaling."
_GEMMA4 = {
    "attention.key_length_swa": 16,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": np.array([1, 0] * 3, bool),
    "attention.shared_kv_layers": 2,
    "embedding_length_per_layer_input": 8,
    "feed_forward_length": np.array([96] * 4 + [192] * 2, np.int32),
}
_STAYS = float(np.float32(1e30))
_YARN = {f"{_ROPE}type": "yarn", f"{_ROPE}factor": 8.0, f"{_ROPE}original_context_length": 64}


def read(
    arch: str,
    changes: dict[str, Any],
    factors: dict[str, Any] | None = None,
    layers: int = 4,
    tensors: Sequence[TensorInfo] = (),
) -> ModelSpec:
    """The model of a file with these keys under "{arch}." and tensors; None takes a key away."""
    keys = {
        "block_count": layers,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.key_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **changes,
    }
    metadata = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    metadata["general.architecture"] = arch
    infos = {info.name: info for info in (EMBEDDING, *tensors)}
    return spec_from_metadata(metadata, infos, factors or {}, "m.gguf")[0]


def windows(spec: ModelSpec) -> list[int]:
    return [layer.window for layer in spec.layers]


def test_every_family_has_a_row_and_a_name_in_the_gguf_package() -> None:
    for family in FAMILIES:
        assert architecture_by_name(family.architecture)
        assert family.gguf_name in gguf.MODEL_ARCH_NAMES.values()


@pytest.mark.parametrize(
    ("arch", "pattern", "expected"),
    [
        ("gemma2", None, [8, 0, 8, 0, 8, 0, 8]),
        ("gemma3", None, [8, 8, 8, 8, 8, 0, 8]),
        ("gemma3", 3, [8, 8, 0, 8, 8, 0, 8]),
        ("gemma3", np.array([0, 0, 1, 0, 1, 1, 0], bool), [0, 0, 8, 0, 8, 8, 0]),
        ("gemma3", np.array([0, 0, 1, 0, 1, 1, 0], np.int32), [0, 0, 8, 0, 8, 8, 0]),
        ("olmo2", None, [8, 8, 8, 0, 8, 8, 8]),
        ("phi3", None, [8] * 7),
        ("phi3", 1, [0] * 7),
    ],
)
def test_windows_follow_the_pattern(arch: str, pattern: Any, expected: list[int]) -> None:
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": pattern}
    assert windows(read(arch, keys, layers=7)) == expected


@pytest.mark.parametrize("arch", ["gemma3", "phi3", "exaone4", "olmo2"])
@pytest.mark.parametrize("window", [0, None])
def test_without_a_window_every_layer_attends_to_everything(arch: str, window: int | None) -> None:
    assert windows(read(arch, {"attention.sliding_window": window})) == [0] * 4


def test_one_name_stands_for_two_families() -> None:
    assert read("olmo2", {}).architecture == "olmo2"
    assert read("olmo2", {"attention.sliding_window": 8}).architecture == "olmo3"
    assert read("llama", {"expert_count": 0}).architecture == "llama"
    mixtral = read("llama", {"expert_count": 8, "expert_used_count": 2})
    assert mixtral.architecture == "mixtral"
    assert mixtral.experts is not None
    assert (mixtral.experts.count, mixtral.experts.per_token, mixtral.experts.normalize) == (8, 2, True)


@pytest.mark.parametrize(
    ("arch", "layers", "width"),
    [("gemma2", 42, 32), ("gemma2", 46, 16), ("gemma3", 48, 32), ("gemma3", 62, 16)],
)
def test_the_largest_gemmas_scale_scores_otherwise(arch: str, layers: int, width: int) -> None:
    assert read(arch, {}, layers=layers).attention.scale == pytest.approx(width**-0.5)


def test_gemma_3_turns_layers_with_a_window_at_their_own_base() -> None:
    keys = {"attention.sliding_window": 8, "rope.freq_base": 1e6, f"{_ROPE}factor": 8.0}
    for own, theta in (({}, 1e4), ({"rope.freq_base_swa": 2e4}, 2e4)):
        sliding, full = read("gemma3", {**keys, **own}, layers=6).ropes
        assert (sliding.theta, sliding.scaling) == (theta, "none")
        assert (full.theta, full.scaling, full.factor) == (1e6, "linear", 8.0)


@pytest.mark.parametrize("turning", range(17))
def test_gemma_4_turns_some_pairs_of_layers_without_a_window(turning: int) -> None:
    factors = {"rope_freqs.weight": (1.0,) * turning + (_STAYS,) * (16 - turning)}
    keys = {**_GEMMA4, "rope.freq_base": 1e6, "rope.freq_base_swa": 2e4, "rope.dimension_count_swa": 12}
    sliding, full = read("gemma4", keys, factors, layers=6).ropes
    assert (sliding.theta, sliding.scaling, sliding.rotary_dim) == (2e4, "none", 12)
    assert (full.theta, full.scaling, full.rotary_dim) == (1e6, "proportional", 32)
    assert full.turning_pairs == turning
    np.testing.assert_array_equal(full.inverse_frequencies() != 0, np.arange(16) < turning)


@pytest.mark.parametrize("wide", [False, True])
def test_gemma_4_has_layers_of_two_kinds(wide: bool) -> None:
    keys = _GEMMA4 if wide else {**_GEMMA4, "feed_forward_length": 96}
    spec = read("gemma4", keys, {"rope_freqs.weight": (1.0,) * 16}, layers=6)
    assert windows(spec) == [8, 0] * 3
    assert [layer.head_dim for layer in spec.layers] == [16, 32] * 3
    assert [layer.cache_of for layer in spec.layers] == [-1] * 4 + [2, 3]
    assert [layer.intermediate_size for layer in spec.layers] == [96] * 4 + [192 if wide else 96] * 2
    assert spec.layer_inputs == 8


@pytest.mark.parametrize(
    ("keys", "error", "match"),
    [
        ({"attention.key_length": None}, CheckpointError, "'attention.key_length' is missing"),
        ({"attention.key_length_swa": None}, CheckpointError, "'attention.key_length_swa' is missing"),
        ({"attention.sliding_window_pattern": None}, CheckpointError, "window_pattern' is missing"),
        ({"embedding_length_per_layer_input": None}, CheckpointError, "per_layer_input' is missing"),
        ({"attention.value_length_swa": 8}, UnsupportedError, "keys and values have different lengths"),
        ({"attention.shared_kv_layers": 1}, UnsupportedError, "'feed_forward_length' differs from layer"),
        ({"feed_forward_length": np.array([96, 96, 192, 192])}, UnsupportedError, "length' differs from"),
        ({"feed_forward_length": np.array([], np.int32)}, CheckpointError, "'feed_forward_length' is array"),
        ({"attention.head_count_kv": np.array([2, 1] * 3)}, UnsupportedError, "head_count_kv' differs from"),
        ({"expert_count": 8, "expert_feed_forward_length": 32}, UnsupportedError, "'expert_count' is 8"),
        ({"rope.dimension_count": 16}, UnsupportedError, "rotation of whole heads without scaling"),
        ({f"{_ROPE}factor": 2.0}, UnsupportedError, "rotation of whole heads without scaling"),
    ],
)
def test_gemma_4_of_another_kind_is_refused(keys: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        read("gemma4", {**_GEMMA4, **keys}, {"rope_freqs.weight": (1.0,) * 16}, layers=6)


@pytest.mark.parametrize(
    "divisors", [(), (1.0,) * 15, (1.0,) * 15 + (2.0,), (1.0, _STAYS) * 8, (2.0,) * 8 + (_STAYS,) * 8]
)
def test_divisors_that_do_more_than_hold_pairs_are_refused(divisors: tuple[float, ...]) -> None:
    factors = {"rope_freqs.weight": divisors} if divisors else {}
    with pytest.raises(UnsupportedError, match=rf"is F32 \[{len(divisors)}\]; expected F32 \[16\], 1 for"):
        read("gemma4", _GEMMA4, factors, layers=6)


def test_keys_that_are_values_too_are_refused_by_name() -> None:
    keys = TensorInfo("blk.5.attn_k.weight", (64, 64), "F32", 4 * 64 * 64, "m.gguf", 0)
    with pytest.raises(UnsupportedError, match=r"blk.5.attn_k.weight .* attention_k_eq_v is not known"):
        read("gemma4", _GEMMA4, layers=6, tensors=[keys])


def test_granite_has_four_multipliers() -> None:
    keys = {"attention.scale": 0.5, "embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0}
    spec = read("granite", keys)
    found = (spec.attention.scale, spec.embedding_scale, spec.residual_scale, spec.logits_scale)
    assert found == (0.5, 12.0, 0.25, 1 / 8)


@pytest.mark.parametrize(
    ("keys", "attention_factor"),
    [
        ({}, 0.1 * math.log(8) + 1),
        ({f"{_ROPE}yarn_log_multiplier": 0.0}, 0.1 * math.log(8) + 1),
        ({f"{_ROPE}yarn_log_multiplier": 1.0}, 1.0),
        ({f"{_ROPE}yarn_attn_factor": 1.5}, 1.5),
    ],
)
def test_yarn_scales_scores_as_the_file_says(keys: dict[str, Any], attention_factor: float) -> None:
    (rope,) = read("mistral3", {**_YARN, f"{_ROPE}yarn_beta_fast": 4.0, **keys}).ropes
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 8.0, 64)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (4.0, 1.0, True)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_ministral_3_heats_far_queries() -> None:
    attention = read("mistral3", {**_YARN, "attention.temperature_scale": 0.1}).attention
    assert (attention.temperature, attention.temperature_context) == (pytest.approx(0.1), 64)


def test_gpt_oss_does_not_round_its_ramp() -> None:
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96}
    spec = read("gpt-oss", {**_YARN, **experts, "attention.sliding_window": 8})
    assert not spec.ropes[0].truncate
    assert windows(spec) == [8, 0, 8, 0]


@pytest.mark.parametrize("size", range(2, 97, 2))
def test_any_part_of_a_head_may_be_rotated(size: int) -> None:
    (rope,) = read("phi3", {"attention.key_length": 96, "rope.dimension_count": size}).ropes
    assert rope.rotary_dim == size


def test_one_number_for_each_layer_may_be_the_same() -> None:
    same = {"attention.head_count_kv": np.array([2] * 4, np.int32)}
    assert read("llama", same).layers[0].num_kv_heads == 2
    with pytest.raises(UnsupportedError, match=r"'attention.head_count_kv' differs from layer to layer"):
        read("llama", {"attention.head_count_kv": np.array([2, 2, 1, 2], np.int32)})


@pytest.mark.parametrize(
    ("arch", "keys", "error", "match"),
    [
        ("gemma3n", {}, UnsupportedError, "'gemma3n' in the GGUF file; known: llama, mistral3"),
        ("qwen2", {"expert_count": 4}, UnsupportedError, "'expert_count' is 4; known is 0 only"),
        ("qwen3", {"attention.causal": False}, UnsupportedError, "'attention.causal' is False"),
        ("qwen3", {"pooling_type": 3}, UnsupportedError, "unknown key 'pooling_type'"),
        (
            "qwen3",
            {"attention.sliding_window": 8},
            UnsupportedError,
            "unknown key 'attention.sliding_window'",
        ),
        ("qwen3", {"attn_logit_softcapping": 5.0}, UnsupportedError, "unknown key 'attn_logit_softcapping'"),
        ("qwen3", {"attention.layer_norm_epsilon": 1e-5}, UnsupportedError, "'attention.layer_norm_epsilon'"),
        ("cohere2", {}, UnsupportedError, "'attention.layer_norm_rms_epsilon'"),
        ("gemma2", {"rope.freq_base_swa": 2e4}, UnsupportedError, "a rope base of their own"),
        ("gemma3", {"attention.sliding_window_pattern": np.ones(3, bool)}, CheckpointError, "3 flags for 4"),
        ("gemma3", {"final_logit_softcapping": -1.0}, CheckpointError, "expected a positive number"),
        ("granite", {f"{_ROPE}finetuned": False}, UnsupportedError, "'rope.scaling.finetuned' is False"),
        ("llama", {f"{_ROPE}type": "longrope"}, CheckpointError, "needs rope_factors_short.weight"),
        ("llama", {**_YARN, f"{_ROPE}attn_factor": 1.2}, UnsupportedError, "known of longrope only"),
        ("llama", {**_YARN, f"{_ROPE}yarn_ext_factor": 0.5}, UnsupportedError, "yarn_ext_factor' is 0.5"),
        ("llama", {"attention.temperature_scale": 0.1}, UnsupportedError, "of yarn in mistral3 only"),
        ("mistral3", {**_YARN, f"{_ROPE}yarn_log_multiplier": 0.5}, UnsupportedError, "as 0 or 1 only"),
        ("gemma3", {"block_count": 1 << 30}, CheckpointError, "num_layers is 1073741824"),
        ("phi3", {"rope.dimension_count": 40}, CheckpointError, "expected at most 1"),
        ("phi3", {"rope.dimension_count": 0}, CheckpointError, "rotary dimension 0"),
        ("stablelm", {"attention.layer_norm_rms_epsilon": None}, CheckpointError, "layer_norm_epsilon"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    arch: str, keys: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        read(arch, keys)


@pytest.mark.parametrize("name", ["rope_factors_short.weight", "rope_factors_long.weight"])
def test_factors_of_longrope_come_in_twos(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"longrope needs rope_factors_.*, which is missing"):
        read("phi3", {}, {name: (1.0,) * 16})


def test_factors_beside_several_rotations_are_refused() -> None:
    keys = {"attention.sliding_window": 8, "rope.freq_base": 1e6}
    with pytest.raises(UnsupportedError, match="beside several rotations"):
        read("gemma3", keys, {"rope_freqs.weight": (1.0,) * 16}, layers=6)


@pytest.mark.parametrize(
    ("xielu", "match"),
    [
        ({}, "'xielu.alpha_p' is None; expected 4 float32"),
        ({"alpha_p": [1.0] * 4, "alpha_n": [1.0] * 3}, "'xielu.alpha_n' is array.*expected 4"),
        ({"alpha_p": [1.0] * 4, "alpha_n": [1.0] * 4, "beta": [0.5, 0.6]}, "known is 0.5 only"),
    ],
)
def test_xielu_needs_its_numbers(tmp_path: Path, xielu: dict[str, Any], match: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "apertus")
    writer.add_block_count(4)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, values in xielu.items():
        writer.add_array(f"xielu.{key}", values)
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(tmp_path / "m.gguf")
