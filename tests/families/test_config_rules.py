"""A config.json that says less, or says it otherwise, means what it means to transformers, or is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from families.conftest import MakeFamily
from families.rows import LAYERS, ROWS, WINDOW, YARN
from families.test_logits import TOLERANCE, reference
from transformers import AutoModelForCausalLM

from pagelet.exporter import export
from pagelet.models.config import spec_from_config
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.runtime import Engine, EngineConfig

ROPE = ("rope_parameters",)
FULL = ["full_attention"] * LAYERS
# The row, what is changed in its config.json, and what is taken out of it.
SAME: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, ()),
    ("nanochat", {"final_logit_softcapping": None}, ()),
    ("granite", {}, ("attention_multiplier",)),
    ("granite4 dense", {}, ("position_embedding_type",)),
    ("granite4 dense", {"position_embedding_type": None}, ()),
    ("mixtral", {}, ROPE),
    ("olmo3", {}, ROPE),
    ("apertus", {}, ROPE),
    ("gpt_oss", {}, ROPE),
    ("ministral3", {}, ROPE),
    ("gpt_neox", {}, ROPE),
    ("gemma4 own caches", {}, ROPE),
    ("exaone4", {}, ("sliding_window",)),
    ("exaone4", {"layer_types": FULL, "sliding_window": WINDOW}, ()),
    ("cohere2", {"layer_types": FULL, "sliding_window": WINDOW}, ()),
    ("mistral", {}, ("sliding_window",)),
    ("qwen2 windows", {}, ("max_window_layers", "layer_types")),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 28}, ()),
    ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW}, ("layer_types",)),
    ("ministral3", {"rope_theta": 1e4, "rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, ROPE),
    ("qwen2", {"rope_theta": 1e4, "rope_scaling": YARN}, ROPE),
    ("llama yarn", {"partial_rotary_factor": 1.0, "rope_interleaved": False}, ()),
]


@pytest.mark.parametrize("case", range(len(SAME)), ids=lambda case: f"{case} {SAME[case][0]}")
def test_it_means_what_it_means_to_transformers(case: int, make_family: MakeFamily, tmp_path: Path) -> None:
    name, changes, dropped = SAME[case]
    folder, _ = make_family(ROWS[name])
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if key not in dropped}
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = np.random.default_rng(1).integers(2, 258, 196).tolist()
    export(folder, tmp_path / "bundle", uncertified(weights="fp32", cache_type="f32"))
    with Engine.open(tmp_path / "bundle", EngineConfig(kv_memory="16MiB")) as engine:
        assert np.abs(engine.logits(ids) - reference(model, ids)).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "are both there and differ"),
        ("gemma4", {"rope_parameters": None, "rope_theta": 1e4}, "must tell of sliding_attention and full"),
        ("granite4 dense", {"position_embedding_type": "alibi"}, "'position_embedding_type' is 'alibi'"),
        ("phi3", {"layer_types": FULL}, "'layer_types'"),
        ("ministral3", {"layer_types": FULL}, "'layer_types'"),
        ("llama yarn", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' = 0.5"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "unknown key"),
        ("gpt2", {"hidden_act": "relu"}, "'hidden_act' = 'relu'"),
        ("gpt2", {"rms_norm_eps": 1e-3, "intermediate_size": 8}, "= 0.001, 'intermediate_size' = 8"),
        ("gpt_neox", {"rms_norm_eps": 1e-3}, "'rms_norm_eps' = 0.001"),
        ("phi3 longrope, long", {"original_max_position_embeddings": 32}, "is 64 there and 32 beside it"),
        ("mixtral", {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}}, "unknown key"),
        ("llama dynamic", {"rope_parameters": {"rope_type": "dynamic", "factor": 2, "alpha": 9}}, "'alpha'"),
        ("gemma3", {"attn_logit_softcapping": 3.0}, "'attn_logit_softcapping' = 3.0"),
        ("cohere2", {"use_parallel_block": False}, "'use_parallel_block' is False"),
        ("llama yarn", {"head_dim": 12}, "heads have 12 elements"),
        ("llama yarn", {"head_dim": 520}, "head_dim is 520"),
    ],
)  # fmt: skip
def test_what_others_would_ignore_is_refused(
    name: str, changes: dict[str, Any], message: str, make_family: MakeFamily
) -> None:
    folder, _ = make_family(ROWS[name])
    config = json.loads((folder / "config.json").read_text())
    spec_from_config(config)
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(config | changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama yarn", {"rope_parameters": {"rope_type": []}}),
        ("llama yarn", {"rope_parameters": {**YARN, "original_max_position_embeddings": 1e-320}}),
        ("llama yarn", {"rope_parameters": {**YARN, "beta_fast": 1e-320}}),
        ("llama yarn", {"rope_parameters": {**YARN, "rope_theta": 1}}),
        ("gemma3", {"layer_types": [[]] * 6}),
        ("gemma3", {"layer_types": [{}] * 6}),
        ("gemma4", {"per_layer_config": {"0": None}}),
        ("gemma4", {"per_layer_config": {"x": {}}}),
        ("gemma4", {"per_layer_config": 5}),
        ("granite", {"logits_scaling": 0}),
        ("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": "x"}}),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}),
        ("phi3 longrope, long",
         {"rope_parameters": {**ROWS["phi3 longrope, long"].options["rope_parameters"],
                              "original_max_position_embeddings": 1}}),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_an_error_of_ours(
    name: str, changes: dict[str, Any], make_family: MakeFamily
) -> None:
    folder, _ = make_family(ROWS[name])
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        spec_from_config(config | changes)


def test_a_hostile_list_of_classes_is_cut_short() -> None:
    with pytest.raises(UnsupportedError) as caught:
        spec_from_config({"architectures": ["A" * 50] * 1_000_000})
    assert len(str(caught.value)) < 3000


def test_layers_of_gemma_4_may_be_numbered_with_zeros(make_family: MakeFamily) -> None:
    """As transformers writes them from ten layers on."""
    folder, _ = make_family(ROWS["gemma4"])
    config = json.loads((folder / "config.json").read_text())
    padded = {f"{int(layer):02}": value for layer, value in config["per_layer_config"].items()}
    assert spec_from_config(config | {"per_layer_config": padded}) == spec_from_config(config)
