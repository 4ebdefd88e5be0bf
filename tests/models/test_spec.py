"""Reading config.json: what is known becomes a spec, what is not is refused by name."""

import dataclasses
import json
from typing import Any

import pytest
from transformers import LlamaConfig

from pagelet.models.architectures import ARCHITECTURES
from pagelet.models.config import spec_from_config
from pagelet.models.errors import CheckpointError, PageletError, UnsupportedError
from pagelet.models.names import GGUF_NAMES
from pagelet.models.weight_shapes import source_name, weight_shapes


def config(**changes: Any) -> dict[str, Any]:
    made = LlamaConfig(hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6,
                       num_key_value_heads=3, vocab_size=100, max_position_embeddings=64)  # fmt: skip
    return {
        **json.loads(made.to_json_string(use_diff=False)),
        "architectures": ["LlamaForCausalLM"],
        **changes,
    }


def test_a_llama_config() -> None:
    spec = spec_from_config(config(tie_word_embeddings=True, attention_bias=True))
    assert (spec.architecture, spec.num_layers, spec.num_heads) == ("llama", 2, 6)
    assert (spec.layers[0].head_dim, spec.layers[0].num_kv_heads, spec.max_context) == (16, 3, 64)
    assert (spec.query_size(1), spec.kv_size(1)) == (96, 48)
    assert spec.tie_embeddings
    assert spec.attention.bias
    assert spec.attention.output_bias
    assert not spec.mlp.bias


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert spec_from_config(config(head_dim=32)).query_size(0) == 192


def test_the_weights_of_a_model_are_listed_with_their_shapes() -> None:
    shapes = dict(weight_shapes(spec_from_config(config(attention_bias=True))))
    assert shapes["layers.1.attention.k.weight"] == (48, 96)
    assert shapes["layers.1.attention.k.bias"] == (48,)
    assert shapes["head.weight"] == (100, 96)
    assert "head.weight" not in dict(weight_shapes(spec_from_config(config(tie_word_embeddings=True))))


@pytest.mark.parametrize(
    ("role", "hf", "gguf"),
    [
        ("layers.3.attention.q.bias", "model.layers.3.self_attn.q_proj.bias", "blk.3.attn_q.bias"),
        ("final_norm.weight", "model.norm.weight", "output_norm.weight"),
    ],
)
def test_names_of_a_role(role: str, hf: str, gguf: str) -> None:
    assert source_name(role, ARCHITECTURES[0].names) == hf
    assert source_name(role, GGUF_NAMES) == gguf


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"FooForCausalLM.*LlamaForCausalLM"):
        spec_from_config(config(architectures=["FooForCausalLM"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": "96"}, "'hidden_size' is '96'; expected int"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"attention_sinks": True}, "'attention_sinks' = True, which is not known of llama"),
        ({"layer_types": ["full_attention"] * 2}, "'layer_types'"),
        ({"pretraining_tp": 2}, "'pretraining_tp' is 2"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 4}, "do not divide"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps'"),
        ({"rms_norm_eps": 2.0}, "norm epsilon"),
        ({"head_dim": 15}, "heads have 15 elements"),
    ],
)
def test_what_makes_no_sense_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(config(**changes))


def test_specs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec_from_config(config()).max_context = 3  # type: ignore[misc]


def test_every_error_of_the_tree_is_a_pagelet_error() -> None:
    assert issubclass(UnsupportedError, CheckpointError)
    assert issubclass(CheckpointError, PageletError)
