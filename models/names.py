"""What the families call their weights.

A *role* is pagelet's own name of a weight ("layers.3.attention.q"); a table says what the role is called in a
Hugging Face checkpoint, with {layer} and {expert} for numbers. A `Part` is a role that shares a tensor with
others. GGUF names its tensors alike in all families, so that table stands once.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Rows of a tensor that holds several roles.

    Attributes:
        name: the tensor's module.
        roles: all that are in it, in order, without "layers.N."; their rows follow one another, or
        by_head: those of a head stand together: the head's q, its k, its v.
        pairs: two roles alternate row by row.
        experts: the tensor's first dimension is the expert.
        suffix: the tensor's name ends in the module, as parameters that are no module's weight do:
            "{name}" for the weight, "{name}_bias" for the bias.
        transposed: the tensor is [in, out].
    """

    name: str
    roles: tuple[str, ...] = ()
    by_head: bool = False
    pairs: bool = False
    experts: bool = False
    suffix: bool = False
    transposed: bool = False


Names = Mapping[str, str | Part]

_AT = "model.layers.{layer}."
LLAMA: Names = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention.norm": _AT + "input_layernorm",
    "attention.q": _AT + "self_attn.q_proj",
    "attention.k": _AT + "self_attn.k_proj",
    "attention.v": _AT + "self_attn.v_proj",
    "attention.o": _AT + "self_attn.o_proj",
    "mlp.norm": _AT + "post_attention_layernorm",
    "mlp.gate": _AT + "mlp.gate_proj",
    "mlp.up": _AT + "mlp.up_proj",
    "mlp.down": _AT + "mlp.down_proj",
}
QK_NORMS: Names = {
    **LLAMA,
    "attention.q_norm": _AT + "self_attn.q_norm",
    "attention.k_norm": _AT + "self_attn.k_norm",
}
POST_NORMS: Names = {
    **QK_NORMS,
    "attention.post_norm": _AT + "post_attention_layernorm",
    "mlp.post_norm": _AT + "post_feedforward_layernorm",
}
SANDWICH: Names = {
    **POST_NORMS,
    "mlp.norm": _AT + "pre_feedforward_layernorm",
}
GEMMA4: Names = {
    **SANDWICH,
    "layer_inputs.table": "model.embed_tokens_per_layer",
    "layer_inputs.projection": "model.per_layer_model_projection",
    "layer_inputs.norm": "model.per_layer_projection_norm",
    "inputs.gate": _AT + "per_layer_input_gate",
    "inputs.projection": _AT + "per_layer_projection",
    "inputs.post_norm": _AT + "post_per_layer_input_norm",
    "scale": _AT + "layer_scalar",
}
HUNYUAN: Names = {
    **LLAMA,
    "attention.q_norm": _AT + "self_attn.query_layernorm",
    "attention.k_norm": _AT + "self_attn.key_layernorm",
}
APERTUS: Names = {
    **QK_NORMS,
    "attention.norm": _AT + "attention_layernorm",
    "mlp.norm": _AT + "feedforward_layernorm",
    "mlp.alpha_p": _AT + "mlp.act_fn.alpha_p",
    "mlp.alpha_n": _AT + "mlp.act_fn.alpha_n",
}
NANOCHAT: Names = {**LLAMA, "mlp.up": _AT + "mlp.fc1", "mlp.down": _AT + "mlp.fc2"}

_QKV = ("attention.q", "attention.k", "attention.v")
_GATE_UP = ("mlp.gate", "mlp.up")
PHI3: Names = {
    **LLAMA,
    **dict.fromkeys(_QKV, Part(_AT + "self_attn.qkv_proj", _QKV)),
    **dict.fromkeys(_GATE_UP, Part(_AT + "mlp.gate_up_proj", _GATE_UP)),
}
GRANITE_HYBRID: Names = {
    **LLAMA,
    **dict.fromkeys(_GATE_UP, Part(_AT + "shared_mlp.input_linear", _GATE_UP)),
    "mlp.down": _AT + "shared_mlp.output_linear",
}
_NEOX = "gpt_neox.layers.{layer}."
GPT_NEOX: Names = {
    "embedding": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "attention.norm": _NEOX + "input_layernorm",
    **dict.fromkeys(_QKV, Part(_NEOX + "attention.query_key_value", _QKV, by_head=True)),
    "attention.o": _NEOX + "attention.dense",
    "mlp.norm": _NEOX + "post_attention_layernorm",
    "mlp.up": _NEOX + "mlp.dense_h_to_4h",
    "mlp.down": _NEOX + "mlp.dense_4h_to_h",
}
_GPT2 = "transformer.h.{layer}."
GPT2: Names = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "attention.norm": _GPT2 + "ln_1",
    **dict.fromkeys(_QKV, Part(_GPT2 + "attn.c_attn", _QKV, transposed=True)),
    "attention.o": Part(_GPT2 + "attn.c_proj", ("attention.o",), transposed=True),
    "mlp.norm": _GPT2 + "ln_2",
    "mlp.up": Part(_GPT2 + "mlp.c_fc", ("mlp.up",), transposed=True),
    "mlp.down": Part(_GPT2 + "mlp.c_proj", ("mlp.down",), transposed=True),
}
_EXPERT = _AT + "mlp.experts.{expert}."
QWEN3_MOE: Names = {
    **QK_NORMS,
    "mlp.router": _AT + "mlp.gate",
    "mlp.experts.gate": _EXPERT + "gate_proj",
    "mlp.experts.up": _EXPERT + "up_proj",
    "mlp.experts.down": _EXPERT + "down_proj",
}
_MIXTRAL = _AT + "block_sparse_moe."
MIXTRAL: Names = {
    **LLAMA,
    "mlp.router": _MIXTRAL + "gate",
    "mlp.experts.gate": _MIXTRAL + "experts.{expert}.w1",
    "mlp.experts.up": _MIXTRAL + "experts.{expert}.w3",
    "mlp.experts.down": _MIXTRAL + "experts.{expert}.w2",
}
_EXPERT_GATE_UP = ("mlp.experts.gate", "mlp.experts.up")
_OSS_GATE_UP = Part(
    _AT + "mlp.experts.gate_up_proj", _EXPERT_GATE_UP, pairs=True, experts=True, suffix=True, transposed=True
)
GPT_OSS: Names = {
    **LLAMA,
    "attention.sinks": _AT + "self_attn.sinks",
    "mlp.router": _AT + "mlp.router",
    **dict.fromkeys(_EXPERT_GATE_UP, _OSS_GATE_UP),
    "mlp.experts.down": Part(
        _AT + "mlp.experts.down_proj", ("mlp.experts.down",), experts=True, suffix=True, transposed=True
    ),
}

GGUF_NAMES: Names = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attention.norm": "blk.{layer}.attn_norm",
    "attention.q": "blk.{layer}.attn_q",
    "attention.k": "blk.{layer}.attn_k",
    "attention.v": "blk.{layer}.attn_v",
    "attention.o": "blk.{layer}.attn_output",
    "attention.q_norm": "blk.{layer}.attn_q_norm",
    "attention.k_norm": "blk.{layer}.attn_k_norm",
    "attention.post_norm": "blk.{layer}.post_attention_norm",
    "mlp.norm": "blk.{layer}.ffn_norm",
    "mlp.gate": "blk.{layer}.ffn_gate",
    "mlp.up": "blk.{layer}.ffn_up",
    "mlp.down": "blk.{layer}.ffn_down",
    "mlp.post_norm": "blk.{layer}.post_ffw_norm",
}
