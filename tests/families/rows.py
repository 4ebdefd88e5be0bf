"""Every family as tiny configs of transformers' own classes, with what is peculiar to it switched on."""

from dataclasses import dataclass, field
from typing import Any

LAYERS = 4
WINDOW = 16
_HALF = ["sliding_attention", "full_attention"] * (LAYERS // 2)
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.0 + 0.5 * i for i in range(8)],
}  # fmt: skip
# Phi-3's own key counts more than the one inside.
LONGROPE_64 = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Row:
    """A config class and its options; `max_context`: of the export, where it is not the config's."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    max_context: int | None = None


ROWS = {
    "llama odd heads": Row("Llama", {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama yarn": Row("Llama", {"rope_parameters": YARN}),
    "llama yarn, mscale": Row("Llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama dynamic": Row("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "mistral": Row("Mistral", {"sliding_window": WINDOW, "head_dim": 32}),
    "ministral": Row("Ministral", {"sliding_window": WINDOW, "layer_types": _HALF, "head_dim": 16}),
    "ministral3": Row("Ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}),
    "qwen2": Row("Qwen2"),
    "qwen2 windows": Row("Qwen2", {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2,
    }),
    "qwen3": Row("Qwen3", {"head_dim": 32}),
    "qwen3 bias": Row("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma2": Row("Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
                             "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "gemma3": Row("Gemma3Text", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
                                 "num_hidden_layers": 6}),
    "gemma4": Row("Gemma4Text", {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "layer_types": _HALF * 2,
        "num_hidden_layers": 8, "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320, "final_logit_softcapping": 10.0,
    }),
    "gemma4 own caches": Row("Gemma4Text", {
        "head_dim": 16, "global_head_dim": 16, "sliding_window": WINDOW, "layer_types": _HALF,
        "hidden_size_per_layer_input": 0,
    }),
    "phi3": Row("Phi3", {"sliding_window": WINDOW}),
    "phi3 longrope, short": Row("Phi3", {**LONGROPE_64}, max_context=64),
    "phi3 longrope, long": Row("Phi3", {**LONGROPE_64}),
    "phi4 partial": Row("Phi3", {
        "head_dim": None, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
    }),
    "smollm3": Row("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3 bias": Row("SmolLM3", {
        "attention_bias": True, "mlp_bias": True, "no_rope_layers": [1, 0, 0, 1],
    }),
    "granite": Row("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                               "attention_multiplier": 0.1, "logits_scaling": 4.0, "attention_bias": True}),
    "granite4 dense": Row("GraniteMoeHybrid", {
        "num_local_experts": 0, "shared_intermediate_size": 96, "layer_types": ["full_attention"] * LAYERS,
        "position_embedding_type": "rope", "attention_multiplier": 0.2, "residual_multiplier": 0.4,
        "embedding_multiplier": 2.0,
    }),
    "granite4 dense, no rope": Row("GraniteMoeHybrid", {
        "num_local_experts": 0, "shared_intermediate_size": 96, "layer_types": ["full_attention"] * LAYERS,
        "position_embedding_type": "nope", "attention_multiplier": 0.2,
    }),
    "olmo2": Row("Olmo2"),
    "olmo3": Row("Olmo3", {"sliding_window": WINDOW, "layer_types": _HALF}),
    "olmo3 yarn": Row("Olmo3", {"sliding_window": WINDOW, "layer_types": _HALF, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": YARN,
    }}),
    "gpt_oss": Row("GptOss", {
        "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 8, "num_experts_per_tok": 3,
        "rope_parameters": {**YARN, "truncate": False},
    }),
    "qwen3_moe": Row("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
                                  "norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe mixed": Row("Qwen3Moe", {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
        "decoder_sparse_step": 2, "mlp_only_layers": [3],
    }),
    "mixtral": Row("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_neox": Row("GPTNeoX", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
    "gpt_neox sequential": Row("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt2": Row("GPT2"),
    "stablelm": Row("StableLm", {"use_qkv_bias": True}),
    "stablelm parallel": Row("StableLm", {"use_parallel_residual": True}),
    "cohere2": Row("Cohere2", {"sliding_window": WINDOW, "head_dim": 16, "layer_types": _HALF}),
    "exaone4": Row("Exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 4}),
    "exaone4 full": Row("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
    "hunyuan": Row("HunYuanDenseV1", {"head_dim": 16}),
    "seed_oss": Row("SeedOss", {"head_dim": 16}),
    "ernie4_5": Row("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "apertus": Row("Apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "arcee": Row("Arcee", {"head_dim": 16}),
    "nanochat": Row("NanoChat"),
}  # fmt: skip
# The first row of each config class.
ONE_EACH = [*{row.kind: name for name, row in reversed(ROWS.items())}.values()]
_COMMON = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
_OWN = {
    "GPTNeoX": {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"},
    "GPT2": {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 512, "vocab_size": 320,
             "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1},
}  # fmt: skip


def config_options(row: Row) -> dict[str, Any]:
    options: dict[str, Any] = {**_OWN.get(row.kind, _COMMON), **row.options}
    return {key: value for key, value in options.items() if key != "head_dim" or value is not None}
