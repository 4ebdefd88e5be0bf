"""The arithmetic of memory, against known cases and against real bundles."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.exporter.options import WEIGHTS
from pagelet.models.cache import CACHE_TYPES, cache_bytes_per_token
from pagelet.models.config import spec_from_config
from pagelet.models.errors import UnsupportedError
from pagelet.models.manifest import load_manifest
from pagelet.models.weight_shapes import weight_shapes
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.cli import main
from pagelet.tools.cli.plan import read_spec
from pagelet.tools.devices import DEVICES
from pagelet.tools.plan import WEIGHT_TYPES, plan, weight_bytes

LLAMA_70B = spec_from_config({
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 128_256, "hidden_size": 8192,
    "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
})  # fmt: skip


def test_the_known_case() -> None:
    """80 layers, 8 KV heads of 128, 16 × 8,192 tokens at 2 bytes: 40 GiB exactly."""
    made = plan(LLAMA_70B, 1 << 40, cache_type="f16", context=8192, sequences=16)
    assert made.cache_bytes == 42_949_672_960 == 40 << 30


@pytest.mark.parametrize(
    ("name", "expected"), [("f32", 655_360), ("f16", 327_680), ("int8", 168_960), ("fp8", 168_960)]
)
def test_bytes_per_token(name: str, expected: int) -> None:
    assert cache_bytes_per_token(LLAMA_70B, name) == expected


def test_an_unknown_cache_type_is_named() -> None:
    with pytest.raises(UnsupportedError, match="'f8'"):
        cache_bytes_per_token(LLAMA_70B, "f8")


def test_weights_of_a_70b_model() -> None:
    """70.55 billion parameters: 2.10 in the table and the head at 8.5 bits, the rest at 5."""
    assert weight_bytes(LLAMA_70B, "bf16") == pytest.approx(2 * 70.55e9, rel=1e-3)
    assert weight_bytes(LLAMA_70B, "int4") == pytest.approx(68.45e9 * 5 / 8 + 2.10e9 * 8.5 / 8, rel=1e-3)


def test_the_plan_of_a_bundle_is_the_bundle(smollm2_int4: Path) -> None:
    manifest = load_manifest(smollm2_int4)
    stored = sum(entry.bytes for entry in manifest.tensors.values())
    norms = sum(4 * shape[0] for _, shape in weight_shapes(manifest.spec) if len(shape) == 1)
    assert weight_bytes(manifest.spec, "int4") == stored + norms


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_plan_of_every_weight_type_is_its_bundle(
    weights: str, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    manifest = export(make_llama(), tmp_path / "b", uncertified(weights=weights))
    stored = sum(entry.bytes for entry in manifest.tensors.values())
    norms = sum(4 * shape[0] for _, shape in weight_shapes(manifest.spec) if len(shape) == 1)
    assert weight_bytes(manifest.spec, weights) == stored + norms


def test_what_fits_is_what_is_left_beside_the_weights() -> None:
    weights = weight_bytes(LLAMA_70B, "int4")
    block = 32 * cache_bytes_per_token(LLAMA_70B, "f16")
    made = plan(LLAMA_70B, weights + 35 * block + 7, cache_type="f16", context=512, sequences=2)
    assert (made.max_tokens, made.max_sequences, made.fits) == (35 * 32, 2, True)
    assert not plan(LLAMA_70B, weights + 32 * block - 1, cache_type="f16", context=512, sequences=2).fits
    assert plan(LLAMA_70B, weights - 1).max_tokens == 0


def test_layers_with_a_window_hold_no_more_than_it() -> None:
    """Half of the layers see 1,024 tokens: they hold those, 511 of a step, and what blocks round up to."""
    layer = LLAMA_70B.layers[0]
    windowed = replace(LLAMA_70B, layers=(replace(layer, window=1024), layer) * 40)
    per_layer = cache_bytes_per_token(LLAMA_70B, "f16") // 80
    made = plan(windowed, 1 << 40, cache_type="f16", context=65_536)
    assert made.cache_bytes == 40 * per_layer * (65_536 + (48 + 1) * 32)


def test_the_plan_is_what_the_engine_allocates(smollm2_int4: Path) -> None:
    manifest = load_manifest(smollm2_int4)
    made = plan(manifest.spec, 1 << 40, cache_type=manifest.cache_type, context=1024, sequences=3)
    with Engine.open(smollm2_int4, EngineConfig(kv_memory=made.cache_bytes)) as engine:
        stats = engine.stats()
        assert stats.kv_bytes == made.cache_bytes
        assert stats.blocks_total * stats.block_size == 3 * 1024


@pytest.mark.parametrize("sequences", [1, 8])
def test_a_batch_shares_the_weights(sequences: int) -> None:
    """A step reads the weights once, but no untied table, and each sequence's cache: here one block."""
    made = plan(LLAMA_70B, 1 << 40, cache_type="f16", context=1, sequences=sequences, bandwidth=1e12)
    read = weight_bytes(LLAMA_70B, "int4") - 128_256 * 8192 * 8.5 / 8
    blocks = sequences * 32 * cache_bytes_per_token(LLAMA_70B, "f16")
    assert made.decode_tokens_per_second == pytest.approx(sequences * 1e12 / (read + blocks))


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_devices_are_plausible(device: object) -> None:
    from pagelet.tools.devices import Device

    assert isinstance(device, Device)
    assert 4 << 30 <= device.usable < device.memory <= 128 << 30
    assert 40e9 < device.bandwidth < 2e12


def test_command_line_from_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    arguments = ["plan", str(tmp_path), "--device", "orin-nano", "--context", "2048", "--kv", "int8"]
    assert main([*arguments, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["context"] == 2048
    assert set(made["weight_bytes"]) == set(WEIGHT_TYPES)
    assert set(made["cache_bytes_per_token"]) == set(CACHE_TYPES)
    assert main(arguments) == 0
    assert "Jetson Orin Nano" in capsys.readouterr().out


def test_a_bundle_is_planned_as_it_is(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(make_llama(), tmp_path / "b", uncertified(weights="fp8", cache_type="int8"))
    for given, expected in ([], ("fp8", "int8")), (["--weights", "fp32", "--kv", "f16"], ("fp32", "f16")):
        assert main(["plan", str(tmp_path / "b"), "--memory", "1GiB", "--json", *given]) == 0
        made = json.loads(capsys.readouterr().out)
        assert (made["weights"], made["cache_type"]) == expected


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """Two of four experts for one token, all for two; a router in float32; of tables only rows."""
    config = {
        "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    spec = spec_from_config(config)
    norms, router, head = 3 * 32 * 4, 16 * 32 * 4, 64 * 32 * 2  # a tile has 16 outputs
    attention, experts = 4 * 32 * 32 * 2, 4 * 3 * 32 * 64 * 2
    assert weight_bytes(spec, "bf16") == norms + router + attention + experts + 2 * head
    for sequences, share in ((1, 0.5), (2, 1), (9, 1)):
        made = plan(spec, 1 << 30, weights="bf16", context=32, sequences=sequences, bandwidth=1e9)
        read = norms + router + attention + share * experts + head + made.cache_bytes
        assert made.decode_tokens_per_second == pytest.approx(sequences * 1e9 / read)


def test_a_wrapper_is_planned_as_its_language_model(tmp_path: Path) -> None:
    """From config.json alone, as everything is."""
    inner = {
        "model_type": "mistral", "hidden_act": "silu", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert read_spec(tmp_path) == spec_from_config({**inner, "architectures": ["MistralForCausalLM"]})
