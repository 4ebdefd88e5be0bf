"""The families as llama.cpp's converter writes them into GGUF files, one data row each.

A row says what `general.architecture` is, what the tensors are called where that differs from Llama's, which
keys are read beside the common ones, and what the file leaves unsaid. Where llama.cpp has a rule for it
(how often a layer attends to everything, which layers are rotated) it stands here or in `ARCHITECTURES`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagelet.models.errors import UnsupportedError
from pagelet.models.names import GGUF_NAMES, Names, Part


@dataclass(frozen=True)
class Key:
    """What config.json calls the value, in Llama's words, and its type; a float must be positive."""

    config: str
    kind: type[int] | type[float] | type[bool] = int


Keys = Mapping[str, Key]


@dataclass(frozen=True)
class GGUFFamily:
    """One family.

    Attributes:
        gguf_name: `general.architecture`.
        architecture: the row of `ARCHITECTURES` that serves it.
        when: a key, there and not zero, that tells it from the next family of the same name.
        permuted: the rows of q and k lie paired for interleaved rotation.
        names: role to tensor name.
        keys: what it reads under "{gguf_name}." beside the common keys.
        only: keys that may only have the value that is built.
        unused: keys that mean nothing in it.
        values: what config.json would say and the file does not.
        rope: the same of `rope_parameters`, where the rotation is scaled.
        windows: layers may attend to a window.
        two_kinds: layers with a window have heads and a rotation of their own, the others turn only some of
            their pairs, as `rope_freqs.weight` says (Gemma 4).
        needs: keys without which nothing can be told, as llama.cpp has no rule for them either.
        ignored: endings of tensors that a file may hold and the model does not use.
        wide_scale: a model of so many layers scales its scores as if its heads were hidden_size / heads wide
            (Gemma's largest; the file does not say so, and llama.cpp goes by the number of layers too).
        note: what is assumed and may be wrong, for whoever exports such a file.
    """

    gguf_name: str
    architecture: str
    when: str = ""
    permuted: bool = False
    names: Names = field(default_factory=lambda: GGUF_NAMES, hash=False)
    keys: Keys = field(default_factory=dict, hash=False)
    only: Mapping[str, Any] = field(default_factory=dict, hash=False)
    unused: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rope: Mapping[str, Any] = field(default_factory=dict, hash=False)
    windows: bool = False
    two_kinds: bool = False
    needs: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    wide_scale: int = 0
    note: str = ""


COMMON_KEYS: Keys = {
    "block_count": Key("num_hidden_layers"),
    "context_length": Key("max_position_embeddings"),
    "embedding_length": Key("hidden_size"),
    "attention.head_count": Key("num_attention_heads"),
}
_EXPERTS: Keys = {"expert_count": Key("num_local_experts"), "expert_used_count": Key("num_experts_per_tok")}
_SCORE_CAP: Keys = {"attn_logit_softcapping": Key("attn_logit_softcapping", float)}
_LOGIT_CAP: Keys = {"final_logit_softcapping": Key("final_logit_softcapping", float)}
_PARALLEL: Keys = {"use_parallel_residual": Key("use_parallel_residual", bool)}
_MULTIPLIERS: Keys = {
    "attention.scale": Key("attention_multiplier", float),
    "embedding_scale": Key("embedding_multiplier", float),
    "residual_scale": Key("residual_multiplier", float),
    "logit_scale": Key("logits_scaling", float),
}
# Of Granite's hybrids, whose layers without recurrence are converted as Granite's.
_UNUSED_MAMBA = ("expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
                 "ssm.inner_size", "ssm.time_step_rank")  # fmt: skip

_AT = "blk.{layer}."
_QKV = ("attention.q", "attention.k", "attention.v")
_FUSED: Names = {**GGUF_NAMES, **dict.fromkeys(_QKV, Part(_AT + "attn_qkv", _QKV))}
_GATE_UP = ("mlp.gate", "mlp.up")
_PHI3: Names = {**_FUSED, **dict.fromkeys(_GATE_UP, Part(_AT + "ffn_up", _GATE_UP))}
_GPT2: Names = {**_FUSED, "positions": "position_embd"}
# Some models call the norm before the MLP by its place behind attention.
_LATE_NORM: Names = {**GGUF_NAMES, "mlp.norm": _AT + "post_attention_norm"}
_APERTUS: Names = {
    **GGUF_NAMES,
    "mlp.alpha_p": "xielu.alpha_p.{layer}",
    "mlp.alpha_n": "xielu.alpha_n.{layer}",
}
_GEMMA4: Names = {
    **GGUF_NAMES,
    "layer_inputs.table": "per_layer_token_embd",
    "layer_inputs.projection": "per_layer_model_proj",
    "layer_inputs.norm": "per_layer_proj_norm",
    "inputs.gate": _AT + "inp_gate",
    "inputs.projection": _AT + "proj",
    "inputs.post_norm": _AT + "post_norm",
    "scale": _AT + "layer_output_scale.weight",
}
_MOE: Names = {
    **GGUF_NAMES,
    "mlp.router": _AT + "ffn_gate_inp",
    **{
        f"mlp.experts.{name}": Part(f"{_AT}ffn_{name}_exps", (f"mlp.experts.{name}",), experts=True)
        for name in ("gate", "up", "down")
    },
}
_GPT_OSS: Names = {**_MOE, "mlp.norm": _LATE_NORM["mlp.norm"], "attention.sinks": _AT + "attn_sinks.weight"}

FAMILIES = (
    # Mistral calls itself llama too; a window of its (in version 0.1 of the 7B) is lost when it is converted.
    GGUFFamily("llama", "mixtral", when="expert_count", permuted=True, names=_MOE, keys=_EXPERTS,
               only={"expert_gating_func": 1}),
    GGUFFamily("llama", "llama", permuted=True),
    GGUFFamily("mistral3", "ministral3", permuted=True),
    GGUFFamily("qwen2", "qwen2"),
    GGUFFamily("qwen3", "qwen3"),
    GGUFFamily("gemma2", "gemma2", keys={**_SCORE_CAP, **_LOGIT_CAP}, windows=True, wide_scale=46),
    GGUFFamily(
        "gemma3", "gemma3", windows=True, wide_scale=62,
        keys={**_LOGIT_CAP, "rope.freq_base_swa": Key("rope_local_base_freq", float)},
    ),
    GGUFFamily(
        "gemma4", "gemma4", names=_GEMMA4, windows=True, two_kinds=True,
        keys={
            **_LOGIT_CAP,
            "attention.key_length": Key("global_head_dim"),
            "attention.key_length_swa": Key("head_dim"),
            "attention.shared_kv_layers": Key("num_kv_shared_layers"),
            "embedding_length_per_layer_input": Key("hidden_size_per_layer_input"),
        },
        needs=("attention.key_length", "attention.key_length_swa", "attention.sliding_window_pattern",
               "embedding_length_per_layer_input"),
        # A model with experts is refused for their number.
        unused=("expert_feed_forward_length",),
        # Layers that share a cache may still have the weights of their own.
        ignored=(".attn_k.weight", ".attn_v.weight", ".attn_k_norm.weight"),
    ),
    GGUFFamily("phi3", "phi3", names=_PHI3, windows=True),
    GGUFFamily("smollm3", "smollm3", permuted=True),
    GGUFFamily("granite", "granite", permuted=True, keys=_MULTIPLIERS, only={"rope.scaling.finetuned": True},
               unused=_UNUSED_MAMBA),
    GGUFFamily("olmo2", "olmo3", when="attention.sliding_window", windows=True),
    GGUFFamily("olmo2", "olmo2", only={"attention.sliding_window": 0}),
    GGUFFamily("stablelm", "stablelm", keys=_PARALLEL),
    GGUFFamily(
        "gptneox", "gpt_neox", names=_FUSED, keys=_PARALLEL,
        note="a GGUF file of GPT-NeoX does not say which GELU its model has: the exact one is built, as "
             "Pythia has it; if config.json's hidden_act is not 'gelu', export the folder of the original",
    ),
    GGUFFamily("gpt2", "gpt2", names=_GPT2),
    GGUFFamily("cohere2", "cohere2", keys={"logit_scale": Key("logit_scale", float)}, windows=True),
    GGUFFamily("exaone4", "exaone4", windows=True),
    GGUFFamily("hunyuan-dense", "hunyuan"),
    GGUFFamily("seed_oss", "seed_oss", names=_LATE_NORM),
    GGUFFamily("ernie4_5", "ernie4_5"),
    GGUFFamily("apertus", "apertus", names=_APERTUS),
    GGUFFamily("arcee", "arcee", permuted=True),
    GGUFFamily(
        "qwen3moe", "qwen3_moe", names=_MOE, values={"norm_topk_prob": True},
        keys={**_EXPERTS, "expert_feed_forward_length": Key("moe_intermediate_size")},
        only={"expert_gating_func": 1, "expert_weights_norm": True, "expert_weights_scale": 1.0},
    ),
    GGUFFamily(
        "gpt-oss", "gpt_oss", names=_GPT_OSS, windows=True, rope={"truncate": False},
        keys={**_EXPERTS, "expert_feed_forward_length": Key("intermediate_size")},
    ),
)  # fmt: skip


def family_of(name: str, present: Iterable[str]) -> GGUFFamily:
    """The row that serves `general.architecture`; `present`: the keys that are there and not zero.

    Raises:
        UnsupportedError: none does.
    """
    keys = set(present)
    for family in FAMILIES:
        if family.gguf_name == name and (not family.when or family.when in keys):
            return family
    known = ", ".join(dict.fromkeys(family.gguf_name for family in FAMILIES))
    raise UnsupportedError(f"Unknown architecture {name!r:.80} in the GGUF file; known: {known}.")
