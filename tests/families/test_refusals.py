"""What a config asks for and no row builds is refused by its name, never left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from families.conftest import MakeFamily
from families.rows import LAYERS, ROWS
from safetensors.numpy import load_file, save_file

from pagelet.exporter import export
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.models.config import spec_from_config
from pagelet.models.errors import CheckpointError, InputError, UnsupportedError

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
_GEMMA4 = {
    **_LLAMA, "architectures": ["Gemma4ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": None, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"rope_scaling": {"rope_type": "abf", "factor": 2.0}}, "rope type 'abf'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "sharpness": 3}}, "'sharpness'"),
        ({"layer_types": ["full_attention"] * LAYERS}, "'layer_types'"),
        ({"attn_temperature_tuning": True}, "'attn_temperature_tuning'"),
        ({"num_local_experts": 8}, "'num_local_experts' = 8"),
        ({"pretraining_tp": 2}, "'pretraining_tp' is 2"),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, "'per_layer_config'"),
        ({"architectures": ["Qwen2ForCausalLM"], "attention_bias": False}, "'attention_bias'"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8,
          "layer_types": ["linear_attention"] * LAYERS}, "layer type 'linear_attention'"),
        ({"architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-5, "rms_norm_eps": None,
          "qk_layernorm": True}, "'qk_layernorm' is True"),
        ({"architectures": ["SomethingForCausalLM"]}, "Unknown architecture"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused(changes: dict[str, Any], message: str) -> None:
    spec_from_config(_LLAMA)
    with pytest.raises(UnsupportedError, match=message):
        spec_from_config({**_LLAMA, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention_k_eq_v": True}, UnsupportedError, "'attention_k_eq_v' is True"),
        ({"enable_moe_block": True}, UnsupportedError, "'enable_moe_block' is True"),
        ({"num_experts": 4}, UnsupportedError, "'num_experts'"),
        ({"use_bidirectional_attention": "all"}, UnsupportedError, "'use_bidirectional_attention' is 'all'"),
        ({"vocab_size_per_layer_input": 100}, UnsupportedError, "'vocab_size_per_layer_input' is 100"),
        ({"num_kv_shared_layers": 3}, CheckpointError, "no layer before 1 to share keys with"),
        ({"num_kv_shared_layers": 9}, CheckpointError, "to share keys with"),
        ({"num_kv_shared_layers": -1}, CheckpointError, "'num_kv_shared_layers' is -1"),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, UnsupportedError, "'sliding_window'"),
        ({"per_layer_config": {"1": {"head_dim": "x"}}}, CheckpointError, "'head_dim'"),
        ({"hidden_size_per_layer_input": 1 << 20}, CheckpointError, "layer_inputs is 1048576"),
    ],
)
def test_gemma_4(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    silent = {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8}
    spec_from_config({**_GEMMA4, **silent})
    with pytest.raises(error, match=message):
        spec_from_config({**_GEMMA4, **silent, **changes})


@pytest.mark.parametrize(
    "name",
    ["Qwen3_5ForCausalLM", "Lfm2ForCausalLM", "NemotronHForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM",
     "FalconH1ForCausalLM", "Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM"],
)  # fmt: skip
def test_recurrent_layers_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} has recurrent layers"):
        spec_from_config({**_LLAMA, "architectures": [name]})


def test_granites_recurrent_layers_are_refused(make_family: MakeFamily) -> None:
    folder, _ = make_family(ROWS["granite4 dense"])
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["mamba", *config["layer_types"][1:]]
    with pytest.raises(UnsupportedError, match="layer type 'mamba'"):
        spec_from_config(config)


@pytest.mark.parametrize("name", ["llama odd heads", "gemma4", "gpt_oss", "gpt2", "apertus", "mixtral"])
def test_every_tensor_is_used_or_the_export_fails_by_name(
    name: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    folder, _ = make_family(ROWS[name])
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "model.layers.0.adapter.weight": np.zeros(3, np.float32)}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"model.layers.0.adapter.weight is unexpected"):
        export(folder, tmp_path / "b", uncertified())
    needed = [key for key in tensors if not key.endswith(("act_fn.beta", "act_fn.eps"))]  # constants
    for missing in needed[:: len(needed) // 8]:
        rest = {key: value for key, value in tensors.items() if key != missing}
        save_file(rest, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{missing} is missing"):
            export(folder, tmp_path / "b", uncertified())


def test_a_shared_layers_own_keys_are_knowingly_unused(make_family: MakeFamily) -> None:
    """Gemma 4's files may hold them; no layer with keys of its own may lack them."""
    folder, _ = make_family(ROWS["gemma4"])
    tensors = load_file(folder / "model.safetensors")
    spare = {"model.layers.7.self_attn.k_proj.weight": np.zeros((64, 64), np.float32)}
    save_file({**tensors, **spare}, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.unused == tuple(spare)
    del tensors["model.layers.3.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.3.self_attn.k_proj.weight is missing"):
        open_checkpoint(folder)


def test_a_context_beyond_the_models_is_refused(make_family: MakeFamily, tmp_path: Path) -> None:
    folder, _ = make_family(ROWS["qwen3"])
    with pytest.raises(InputError, match="513"):
        export(folder, tmp_path / "b", uncertified(max_context=513))
