"""Families as GGUF files can tell of them: what a file leaves out has the value that the real models have."""

from dataclasses import replace
from typing import Any

from families.rows import LAYERS, LONGROPE, ROWS, WINDOW, YARN, Row

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_TEMPERED = {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
_GEMMA = {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32, "vocab_size": 259}
# Its layers that turn some pairs only turn another part of them than those of the real models.
_PROPORTIONAL = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
_GEMMA4 = {"vocab_size": 259, "vocab_size_per_layer_input": 259}
# Gemma's largest models are known by their number of layers: 64 / 4 is not the width of a head.
_WIDE = {**_GEMMA, "query_pre_attn_scalar": 16, "intermediate_size": 32, "num_key_value_heads": 1}
_PHI = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}


def _as(name: str, **options: Any) -> Row:
    row = ROWS[name]
    return replace(row, options={**row.options, **options})


GGUF_ROWS = {
    "llama odd heads": ROWS["llama odd heads"],
    "llama biases": Row("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": Row("Llama", {"tie_word_embeddings": True}),
    "llama3": Row("Llama", {"rope_parameters": LLAMA3}),
    "llama linear": Row("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama yarn": ROWS["llama yarn"],
    "llama yarn, factor": Row("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "mistral": Row("Mistral", {"sliding_window": None, "head_dim": 32}),
    "ministral3": Row("Ministral3", {"rope_parameters": _TEMPERED, "head_dim": 32}),
    "qwen2": ROWS["qwen2"],
    "qwen2 yarn": Row("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ROWS["qwen3"],
    "qwen3 bias": ROWS["qwen3 bias"],
    "gemma2": _as("gemma2", **_GEMMA),
    "gemma2, 46 layers": _as("gemma2", **_WIDE, num_hidden_layers=46),
    "gemma3": _as("gemma3", **_GEMMA, rope_parameters=_LINEAR, num_hidden_layers=12),
    "gemma3, 62 layers": _as("gemma3", **_WIDE, num_hidden_layers=62),
    "gemma4": _as("gemma4", **_GEMMA4),
    "gemma4 narrow": _as("gemma4", **_GEMMA4, use_double_wide_mlp=False, rope_parameters=_PROPORTIONAL),
    "gemma4 own caches": _as("gemma4 own caches", **_GEMMA4, global_head_dim=32),
    "phi3": ROWS["phi3"],
    "phi3 longrope, short": Row("Phi3", _PHI, max_context=64),
    "phi3 longrope, long": Row("Phi3", _PHI),
    "phi4 partial": ROWS["phi4 partial"],
    "smollm3": Row("SmolLM3", {"no_rope_layer_interval": 4, "num_hidden_layers": 2 * LAYERS}),
    "smollm3 bias": Row("SmolLM3", {"attention_bias": True, "mlp_bias": True}),
    "granite": ROWS["granite"],
    "granite4 dense": _as("granite4 dense", num_experts_per_tok=0),
    "olmo2": ROWS["olmo2"],
    "olmo3": ROWS["olmo3"],
    "olmo3 yarn": ROWS["olmo3 yarn"],
    "stablelm": ROWS["stablelm"],
    "stablelm parallel": ROWS["stablelm parallel"],
    "gpt_neox": ROWS["gpt_neox"],
    "gpt_neox sequential": Row("GPTNeoX", {"use_parallel_residual": False}),
    "gpt2": ROWS["gpt2"],
    "cohere2": Row("Cohere2", {"sliding_window": WINDOW, "head_dim": 16}),
    "exaone4": ROWS["exaone4"],
    "exaone4 full": ROWS["exaone4 full"],
    "hunyuan": ROWS["hunyuan"],
    "seed_oss": ROWS["seed_oss"],
    "ernie4_5": ROWS["ernie4_5"],
    "apertus": ROWS["apertus"],
    "apertus llama3": Row("Apertus", {"rope_parameters": LLAMA3}),
    "arcee": ROWS["arcee"],
    "qwen3_moe": ROWS["qwen3_moe"],
    "mixtral": ROWS["mixtral"],
    "gpt_oss": ROWS["gpt_oss"],
}  # fmt: skip

# What the converter reads as older configs have it: beside what transformers writes now.
OLDER_CONFIG: dict[str, dict[str, Any]] = {
    "GPT2": {"n_ctx": 512},
    "GPTNeoX": {"rotary_pct": 0.25},
    "Cohere2": {"rotary_pct": 1.0},
    "GraniteMoeHybrid": {"layer_types": ["attention"] * LAYERS},
}
