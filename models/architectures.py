"""The model families, one data row each.

A row says which classes of config.json it serves, what its weights are called, how its layers are built where
that differs from Llama's, and which keys of config.json it reads beside the common ones. What no row reads is
refused (`models/config.py`): a value that nobody looked at makes gibberish.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagelet.models.errors import UnsupportedError
from pagelet.models.names import (
    APERTUS,
    GEMMA4,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    GRANITE_HYBRID,
    HUNYUAN,
    LLAMA,
    MIXTRAL,
    NANOCHAT,
    PHI3,
    POST_NORMS,
    QK_NORMS,
    QWEN3_MOE,
    SANDWICH,
    Names,
)  # fmt: skip

_WINDOWS = ("sliding_window", "layer_types")
_QWEN_WINDOWS = (*_WINDOWS, "use_sliding_window", "max_window_layers")
_PARTIAL = ("partial_rotary_factor",)
_GEMMA = (*_WINDOWS, "query_pre_attn_scalar", "final_logit_softcapping", "attention_bias",
          "use_bidirectional_attention")  # fmt: skip
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_APERTUS_ROPE = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
_GPT_OSS_ROPE = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False,
                 "original_max_position_embeddings": 4096}  # fmt: skip
_MINISTRAL3_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                    "llama_4_scaling_beta": 0.1}  # fmt: skip
# Of layers that a dense Granite 4 does not have.
_UNUSED_MAMBA = (
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "intermediate_size",
)  # fmt: skip
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


@dataclass(frozen=True)
class Architecture:
    """One family.

    Attributes:
        name: pagelet's name, as the manifest stores it.
        hf_classes: entries of `architectures` in config.json that it serves.
        names: role to tensor name in a Hugging Face checkpoint.
        reads: keys of config.json that it reads beside the common ones.
        keys: where config.json calls a value otherwise than Llama's does: {Llama's key: its own}.
        values: what a key means where config.json is silent.
        only: keys that may only have these values: others are not built.
        ignored: endings of tensors that a checkpoint may hold and the model does not use.
        activations: values of `hidden_act` that it knows.
        gated: the MLP is act(gate) · up.
        block: of `ModelSpec`.
        norm: its fields of `NormSpec`.
        norm_offset: what the checkpoint's norm weights lack: Gemma stores w - 1.
        attention: its fields of `AttentionSpec`.
        full_every: of so many layers the last attends to everything, the others to a window.
        window_rule: where `layer_types` is silent and windows are on: "" by `full_every`, "behind" from layer
            `max_window_layers` on, "all", or "unrotated" those that are not rotated.
        rope_on: "" all layers are rotated; "windows" only those with a window; "windows_if_any" the same, but
            all where the model has none.
        rope_kinds: layers with a window have a rotation of their own.
        rope: its fields of `RopeSpec`.
        model: its fields of `ModelSpec`.
        scaled_embedding: the table's rows are scaled by the square root of their width.
        routing: of `ExpertsSpec`.
    """

    name: str
    hf_classes: tuple[str, ...]
    names: Names = field(default_factory=lambda: LLAMA, hash=False)
    reads: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    ignored: tuple[str, ...] = ()
    activations: tuple[str, ...] = ("silu",)
    gated: bool = True
    block: str = "pre"
    norm: Mapping[str, Any] = field(default_factory=dict, hash=False)
    norm_offset: float = 0.0
    attention: Mapping[str, Any] = field(default_factory=dict, hash=False)
    full_every: int = 0
    window_rule: str = ""
    rope_on: str = ""
    rope_kinds: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict, hash=False)
    model: Mapping[str, Any] = field(default_factory=dict, hash=False)
    scaled_embedding: bool = False
    routing: str = "softmax_topk"


_LAYER_NORM = {"type": "layer", "bias": True}
_HEAD_NORM = {"norm": "head"}

ARCHITECTURES = (
    Architecture(
        "llama", ("LlamaForCausalLM",),
        reads=("attention_bias", "mlp_bias"), ignored=("rotary_emb.inv_freq",),
    ),
    Architecture(  # Mistral's GGUF files call themselves llama
        "mistral", ("MistralForCausalLM", "MinistralForCausalLM"), reads=_WINDOWS,
        values={"sliding_window": 4096},
    ),
    Architecture("ministral3", ("Ministral3ForCausalLM",), reads=("sliding_window",),
                 values={"head_dim": 128, "rope_parameters": _MINISTRAL3_ROPE}),
    Architecture("qwen2", ("Qwen2ForCausalLM",), reads=_QWEN_WINDOWS, attention={"bias": True},
                 window_rule="behind", values={"max_window_layers": 28}),
    Architecture("qwen3", ("Qwen3ForCausalLM",), QK_NORMS, reads=("attention_bias", *_QWEN_WINDOWS),
                 attention=_HEAD_NORM, window_rule="behind",
                 values={"max_window_layers": 28, "head_dim": 128}),
    Architecture(
        "gemma2", ("Gemma2ForCausalLM",), SANDWICH,
        reads=(*_GEMMA, "attn_logit_softcapping"), keys={"hidden_act": "hidden_activation"},
        values={"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0, "sliding_window": 4096, "head_dim": 256},
        activations=("gelu_pytorch_tanh",), block="sandwich", norm_offset=1.0, full_every=2,
        scaled_embedding=True,
    ),
    Architecture(
        "gemma3", ("Gemma3ForCausalLM",), SANDWICH,
        reads=(*_GEMMA, "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"),
        keys={"hidden_act": "hidden_activation"},
        values={"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
                "head_dim": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        activations=("gelu_pytorch_tanh",), block="sandwich", norm_offset=1.0, full_every=6,
        scaled_embedding=True, attention=_HEAD_NORM, rope_kinds=True,
    ),
    Architecture(
        "gemma4", ("Gemma4ForCausalLM",), GEMMA4,
        reads=(*_WINDOWS, "final_logit_softcapping", "attention_bias", "use_bidirectional_attention",
               "global_head_dim", "per_layer_config", "num_global_key_value_heads", "attention_k_eq_v",
               "num_kv_shared_layers", "use_double_wide_mlp", "enable_moe_block",
               "hidden_size_per_layer_input", "vocab_size_per_layer_input", *_PARTIAL),
        keys={"hidden_act": "hidden_activation"},
        values={"tie_word_embeddings": True, "sliding_window": 512, "head_dim": 256, "global_head_dim": 512,
                "attention_multiplier": 1.0, "hidden_size_per_layer_input": 256,
                "rope_parameters": _GEMMA4_ROPE},
        # Layers that share a cache may still have the weights of their own.
        ignored=("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight"),
        activations=("gelu_pytorch_tanh",), block="sandwich", full_every=6, scaled_embedding=True,
        attention={"norm": "head", "norm_values": True}, model={"layer_scales": True}, rope_kinds=True,
    ),
    Architecture(
        "phi3", ("Phi3ForCausalLM",), PHI3,
        reads=("sliding_window", "original_max_position_embeddings", *_PARTIAL),
        only={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
    ),
    Architecture(
        "smollm3", ("SmolLM3ForCausalLM",),
        reads=("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", *_QWEN_WINDOWS),
        values={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        window_rule="unrotated",
    ),
    Architecture("granite", ("GraniteForCausalLM",), reads=("attention_bias", "mlp_bias", *_MULTIPLIERS),
                 values={"attention_multiplier": 1.0}),
    Architecture(
        "granite_hybrid", ("GraniteMoeHybridForCausalLM",), GRANITE_HYBRID,
        reads=("attention_bias", "layer_types", "layers_block_type", "position_embedding_type",
               "num_local_experts", "num_experts_per_tok", *_MULTIPLIERS, *_UNUSED_MAMBA),
        keys={"intermediate_size": "shared_intermediate_size"}, values={"attention_multiplier": 1.0},
        only={"position_embedding_type": ("rope", "nope"), "normalization_function": ("rmsnorm",)},
    ),
    Architecture("olmo2", ("Olmo2ForCausalLM",), POST_NORMS, reads=("attention_bias",), block="post",
                 attention={"norm": "row"}),
    Architecture("olmo3", ("Olmo3ForCausalLM",), POST_NORMS, reads=("attention_bias", *_WINDOWS),
                 block="post", attention={"norm": "row"}, full_every=4, rope_kinds=True,
                 values={"rope_theta": 5e5, "sliding_window": 4096}),
    Architecture(
        "gpt_oss", ("GptOssForCausalLM",), GPT_OSS,
        reads=("attention_bias", *_WINDOWS, "num_local_experts", "num_experts_per_tok", "swiglu_limit",
               "swiglu_alpha", "initial_context_length", "experts_per_token"),
        values={"attention_bias": True, "head_dim": 64, "sliding_window": 128,
                "rope_parameters": _GPT_OSS_ROPE}, activations=("silu",),
        attention={"sinks": True}, full_every=2, routing="topk_softmax",
    ),
    Architecture(
        "qwen3_moe", ("Qwen3MoeForCausalLM",), QWEN3_MOE,
        reads=("attention_bias", "sliding_window", "use_sliding_window", "max_window_layers", "num_experts",
               "num_local_experts", "num_experts_per_tok",
               "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
        attention=_HEAD_NORM, window_rule="all",
    ),
    Architecture(
        "mixtral", ("MixtralForCausalLM",), MIXTRAL,
        reads=("sliding_window", "num_local_experts", "num_experts_per_tok"),
        values={"norm_topk_prob": True, "rope_theta": 1e6},
    ),
    Architecture(
        "gpt_neox", ("GPTNeoXForCausalLM",), GPT_NEOX,
        reads=("attention_bias", "use_parallel_residual", "rotary_pct", "rotary_emb_base", *_PARTIAL),
        keys={"rms_norm_eps": "layer_norm_eps", "partial_rotary_factor": "rotary_pct",
              "rope_theta": "rotary_emb_base"},
        values={"attention_bias": True, "mlp_bias": True, "use_parallel_residual": True,
                "partial_rotary_factor": 0.25},
        ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
        activations=("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"), gated=False, norm=_LAYER_NORM,
    ),
    Architecture(
        "gpt2", ("GPT2LMHeadModel",), GPT2,
        keys={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
              "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
              "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"},
        reads=("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "n_ctx"),
        values={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        ignored=("attn.bias", "attn.masked_bias"), activations=("gelu_new", "gelu", "relu"), gated=False,
        norm=_LAYER_NORM, model={"position_table": True},
    ),
    Architecture(
        "stablelm", ("StableLmForCausalLM",),
        reads=("use_qkv_bias", "qk_layernorm", "use_parallel_residual", *_PARTIAL),
        keys={"rms_norm_eps": "layer_norm_eps"}, values={"partial_rotary_factor": 0.25}, norm=_LAYER_NORM,
    ),
    Architecture(
        "cohere2", ("Cohere2ForCausalLM",),
        reads=("attention_bias", "logit_scale", *_WINDOWS, "sliding_window_pattern",
               "use_parallel_embedding"),
        only={"layer_switch": (4,), "order_of_interleaved_layers": ("local_attn_first",),
              "rotary_pct": (1.0,),
              "position_embedding_type": ("rope_gptj",), "use_embedding_sharing": (True,),
              "use_gated_activation": (True,), "use_parallel_block": (True,)},
        keys={"rms_norm_eps": "layer_norm_eps"},
        values={"tie_word_embeddings": True, "logit_scale": 0.0625, "sliding_window": 4096},
        block="parallel", norm={"type": "layer"}, attention={"rotary_interleaved": True}, full_every=4,
        rope_on="windows",
    ),
    Architecture(
        "exaone4", ("Exaone4ForCausalLM",), POST_NORMS, reads=(*_WINDOWS, "sliding_window_pattern"),
        values={"sliding_window": 4096}, block="post", attention=_HEAD_NORM, full_every=4,
        rope_on="windows_if_any",
    ),
    Architecture("hunyuan", ("HunYuanDenseV1ForCausalLM",), HUNYUAN, reads=("attention_bias",),
                 attention={"norm": "head", "norm_after_rotation": True}),
    Architecture("seed_oss", ("SeedOssForCausalLM",),
                 reads=("attention_bias", "attention_out_bias", "mlp_bias"),
                 values={"attention_bias": True, "attention_out_bias": False, "head_dim": 128}),
    Architecture("ernie4_5", ("Ernie4_5ForCausalLM",), reads=("use_bias",),
                 values={"tie_word_embeddings": True, "rope_theta": 5e5, "head_dim": 128},
                 attention={"rotary_interleaved": True}),
    Architecture("apertus", ("ApertusForCausalLM",), APERTUS, reads=("attention_bias",),
                 values={"rope_parameters": _APERTUS_ROPE}, only={"post_norm": (False,), "qk_norm": (True,)},
                 activations=("xielu",), gated=False, attention=_HEAD_NORM,
                 ignored=("act_fn.beta", "act_fn.eps")),
    Architecture("arcee", ("ArceeForCausalLM",), reads=("attention_bias", "mlp_bias"),
                 activations=("relu2",), gated=False),
    Architecture(
        "nanochat", ("NanoChatForCausalLM",), NANOCHAT,
        reads=("attention_bias", "final_logit_softcapping"), values={"final_logit_softcapping": 15.0},
        activations=("relu2",), gated=False, norm={"weight": False},
        attention={"norm": "head", "norm_after_rotation": True, "norm_weight": False},
        rope={"backwards": True}, model={"embedding_norm": True},
    ),
)  # fmt: skip

# Refused by name: recurrent layers own a state per sequence, which the cache does not hold yet.
RECURRENT = ("Qwen3_5", "Qwen3Next", "Lfm2", "Lfm3", "NemotronH", "Mamba", "FalconMamba", "FalconH1", "Jamba",
             "Bamba", "Zamba", "Rwkv", "RecurrentGemma", "KimiLinear", "OlmoHybrid")  # fmt: skip


def _known() -> str:
    return ", ".join(name for row in ARCHITECTURES for name in row.hf_classes)


def architecture_by_name(name: str) -> Architecture:
    for row in ARCHITECTURES:
        if row.name == name:
            return row
    raise UnsupportedError(f"Unknown architecture {name!r}; known: {_known()}.")


def architecture_of_hf(classes: object) -> Architecture:
    """The row that serves config.json's `architectures`."""
    names = classes[:16] if isinstance(classes, list) else []
    for row in ARCHITECTURES:
        if any(name in row.hf_classes for name in names):
            return row
    found = ", ".join(map(str, names[:4])) or "none named"
    if any(str(name).startswith(RECURRENT) for name in names):
        raise UnsupportedError(
            f"{found} has recurrent layers, whose state per sequence this version does not keep; "
            "models whose layers all attend are served."
        )
    raise UnsupportedError(f"Unknown architecture ({found}) in config.json; known: {_known()}.")
