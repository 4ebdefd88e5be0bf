"""A GGUF file gives the same bundle as the folder that it was made of: the same logits, to the bit."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from exporting import uncertified
from families.conftest import MakeFamily
from families.gguf_rows import GGUF_ROWS
from families.rows import LONGROPE, WINDOW
from families.written_gguf import write_gguf
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

from pagelet.exporter import export
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.models.errors import UnsupportedError
from pagelet.runtime import Engine, EngineConfig


@dataclass(frozen=True)
class File:
    """The row, `general.architecture`, what is said under it, and tensors beside the model's."""

    row: str
    arch: str
    keys: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


_LONGROPE = {
    "rope_factors_short.weight": LONGROPE["short_factor"],
    "rope_factors_long.weight": LONGROPE["long_factor"],
}
_NEOX = {"use_parallel_residual": True, "rope.dimension_count": 4}
_GEMMA4 = {
    "attention.sliding_window": WINDOW, "attention.key_length_swa": 16, "attention.value_length_swa": 16,
    "rope.freq_base": 1e6, "final_logit_softcapping": 10.0,
}  # fmt: skip
# A layer that shares a cache may still have the weights of its own.
_UNREAD = {
    "blk.6.attn_k.weight": np.ones((32, 64)), "blk.6.attn_v.weight": np.ones((32, 64)),
    "blk.6.attn_k_norm.weight": np.ones(16),
}  # fmt: skip
_MOE = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}
FILES = [
    File("llama biases", "llama", {"rope.dimension_count": 16, "vocab_size": 320}),
    File("llama tied", "llama"),
    File("qwen2", "qwen2"),
    File("qwen3", "qwen3", {"rope.freq_base": 10000.0}),
    File("gemma2", "gemma2", {
        "attention.sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0,
    }),
    File("gemma3", "gemma3", {
        "attention.sliding_window": WINDOW, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }),
    File("gemma4", "gemma4", {
        **_GEMMA4, "attention.key_length": 32, "attention.value_length": 32,
        "attention.sliding_window_pattern": [True, False] * 4, "attention.shared_kv_layers": 4,
        "feed_forward_length": [96] * 4 + [192] * 4, "embedding_length_per_layer_input": 32,
    }, {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12, **_UNREAD}),
    File("phi3", "phi3", {"attention.sliding_window": WINDOW, "rope.dimension_count": 16}),
    File("phi4 partial", "phi3", {"attention.sliding_window": 0, "rope.dimension_count": 8}),
    File("phi3 longrope, short", "phi3", {"rope.scaling.original_context_length": 64}, _LONGROPE),
    File("phi3 longrope, long", "phi3", {"rope.scaling.original_context_length": 64}, _LONGROPE),
    File("smollm3", "smollm3", {"rope.freq_base": 2e6}),
    File("olmo3", "olmo2", {
        "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False] * 2,
        "rope.freq_base": 5e5, "rope.freq_base_swa": 5e5,
    }),
    File("qwen3_moe", "qwen3moe", _MOE),
    File("gpt_neox", "gptneox", _NEOX),
]  # fmt: skip


@pytest.fixture
def logits(tmp_path: Path) -> Callable[[Path, int | None], np.ndarray[Any, Any]]:
    def export_and_run(source: Path, max_context: int | None) -> np.ndarray[Any, Any]:
        bundle = tmp_path / f"bundle of {source.name}"
        export(source, bundle, uncertified(weights="fp32", cache_type="f32", max_context=max_context))
        ids = np.random.default_rng(1).integers(2, 258, 60).tolist()
        with Engine.open(bundle, EngineConfig(kv_memory="16MiB")) as engine:
            return engine.logits(ids)

    return export_and_run


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.row)
def test_file_and_folder_give_the_same_bits(
    file: File, make_family: MakeFamily, tmp_path: Path, logits: Any
) -> None:
    folder, model = make_family(GGUF_ROWS[file.row])
    path = tmp_path / "model.gguf"
    write_gguf(path, file.arch, model, file.keys, file.extra)
    max_context = GGUF_ROWS[file.row].max_context
    assert np.array_equal(logits(path, max_context), logits(folder, max_context))


@pytest.mark.parametrize(("row", "count"), [("gpt_neox", 1), ("qwen2", 0)])
def test_what_is_assumed_is_said(row: str, count: int, make_family: MakeFamily, tmp_path: Path) -> None:
    _, model = make_family(GGUF_ROWS[row])
    path, notes = tmp_path / "model.gguf", list[str]()
    file = next(file for file in FILES if file.row == row)
    write_gguf(path, file.arch, model, file.keys)
    export(path, tmp_path / "b", uncertified(weights="fp32"), on_note=notes.append)
    assert sum("does not say which GELU" in note for note in notes) == count


def test_experts_keep_their_codes(make_family: MakeFamily, tmp_path: Path) -> None:
    _, model = make_family(GGUF_ROWS["qwen3_moe"])
    path, kinds = tmp_path / "model.gguf", {"down_exps.weight": "MXFP4", "exps.weight": "Q4_0"}
    write_gguf(path, "qwen3moe", model, _MOE, kinds=kinds)
    experts = model.state_dict()["model.layers.2.mlp.experts.gate_up_proj"].numpy()
    expected = rounded(experts[5][32:], "Q4_0")
    with open_checkpoint(path) as checkpoint:
        role = "layers.2.mlp.experts.5.up.weight"
        np.testing.assert_array_equal(checkpoint.read(role, 3, 20), expected[3:20])
        blocks = checkpoint.read_blocks(role, 3, 20)
        assert blocks is not None
        codes = blocks.codes.reshape(17, -1, 32).astype(np.float32) - 8
        restored = codes * blocks.scales[..., None].astype(np.float32)
        np.testing.assert_array_equal(restored.reshape(17, -1), expected[3:20])
        down = model.state_dict()["model.layers.1.mlp.experts.down_proj"].numpy()[7]
        values = checkpoint.read("layers.1.mlp.experts.7.down.weight")
        np.testing.assert_array_equal(values, rounded(down, "MXFP4"))


def test_fused_rows_keep_their_codes(make_family: MakeFamily, tmp_path: Path) -> None:
    _, model = make_family(GGUF_ROWS["phi3"])
    path = tmp_path / "model.gguf"
    write_gguf(path, "phi3", model, {}, kinds={"attn_qkv.weight": "Q8_0", "ffn_up.weight": "Q8_0"})
    fused = {"attention.k": ("self_attn.qkv_proj", 64), "mlp.up": ("mlp.gate_up_proj", 96)}
    with open_checkpoint(path) as checkpoint:
        for role, (module, first) in fused.items():
            whole = model.state_dict()[f"model.layers.1.{module}.weight"].numpy()[first:]
            expected = rounded(whole, "Q8_0")[5:30]
            np.testing.assert_array_equal(checkpoint.read(f"layers.1.{role}.weight", 5, 30), expected)
            blocks = checkpoint.read_blocks(f"layers.1.{role}.weight", 5, 30)
            assert blocks is not None
            assert blocks.codes.shape == (25, 64)


def test_an_adapter_of_rows_in_another_order_is_refused(make_family: MakeFamily, tmp_path: Path) -> None:
    _, model = make_family(GGUF_ROWS["gpt_neox"])
    path = tmp_path / "model.gguf"
    write_gguf(path, "gptneox", model, _NEOX)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["query_key_value"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    at = "base_model.model.gpt_neox.layers.1.attention.query_key_value.lora_"
    factors = {at + "A.weight": np.ones((2, 64), np.float32), at + "B.weight": np.ones((192, 2), np.float32)}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="rows a GGUF file has in another order"):
        open_checkpoint(path, tmp_path)


def rounded(array: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    qtype = gguf.GGMLQuantizationType[kind]
    return np.asarray(dequantize(quantize(array, qtype), qtype))
