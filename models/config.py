"""A Hugging Face config.json read as a ModelSpec: by its family's row, every key accounted for."""

from collections.abc import Mapping
from typing import Any

from pagelet.models.architectures import Architecture, architecture_of_hf
from pagelet.models.config_layers import (
    cache_owners,
    layer_heads,
    layer_kinds,
    layer_rotations,
    layer_windows,
)
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.rope_config import query_temperature, rope_section
from pagelet.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    check_limits,
)
from pagelet.models.strict import require

WHERE = "config.json"
# Read of every family.
_COMMON = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "hidden_act", "hidden_activation", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "pretraining_tp", "quantization_config",
)  # fmt: skip
# These do not change what a trained model computes.
_HARMLESS = (
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "add_cross_attention", "auto_map", "attention_dropout", "attn_pdrop", "attn_dropout",
    "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "classifier_dropout",
    "dtype", "embd_pdrop", "eod_token_id", "eos_token_id", "finetuning_task", "hidden_dropout",
    "hidden_dropout_prob", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder",
    "is_llama_config", "label2id", "layer_group_size", "mlp_dropout", "model_type", "output_attentions",
    "output_hidden_states", "init_method", "output_router_logits", "pad_token_id", "prefix",
    "problem_type", "pruned_heads", "reorder_and_upcast_attn", "resid_pdrop", "residual_dropout",
    "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise",
    "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "training_sequence_length", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_cache", "im_end_id", "im_start_id", "pad_id",
)  # fmt: skip
# What pagelet calls their values of `hidden_act`.
_ACTIVATIONS = {
    "silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "relu2": "relu2", "xielu": "xielu",
}  # fmt: skip
# Keys of some rows that may only have a value that is built ("vision": of images, which are not read).
_ONLY = {
    "use_bidirectional_attention": (False, "vision"), "qk_layernorm": (False,),
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "swiglu_alpha": (1.702,),
    "pretraining_tp": (1,), "attention_k_eq_v": (False,), "enable_moe_block": (False,),
}  # fmt: skip


# Keys that change nothing with these values, whoever has them.
_NEUTRAL: dict[str, Any] = {"rope_interleaved": False, "partial_rotary_factor": 1.0}
# What a family without them may still say that it has not.
_BIASES = ("attention_bias", "mlp_bias")


class Config:
    """config.json with the names and the defaults of Llama's, as the family's row translates them."""

    def __init__(self, data: Mapping[str, Any], row: Architecture) -> None:
        own = {theirs: ours for ours, theirs in row.keys.items()}
        self.row = row
        self._check_known(data, own)
        self._check_values(data)
        self.data: dict[str, Any] = {**row.values}
        if any(data.get(key) is not None for key in ("rope_parameters", "rope_scaling", "rope_theta")):
            self.data.pop("rope_parameters", None)  # of a config that says nothing of rotation
        for key, value in data.items():
            name = own.get(key, key)
            if value is not None and not (name == key and key in row.keys):
                self.data[name] = value
            elif value is None and not name.startswith("rope"):
                self.data.pop(name, None)  # null says that there is none, not that nothing is said

    def _check_known(self, data: Mapping[str, Any], own: Mapping[str, str]) -> None:
        # Llama's name of a key that the family calls otherwise would be passed over.
        foreign = {key for key, theirs in self.row.keys.items() if data.get(key) != data.get(theirs)}
        known = {*_COMMON, *_HARMLESS, *own} - foreign | {*self.row.reads, *self.row.only}
        neutral = _NEUTRAL if self.row.attention.get("bias") else _NEUTRAL | dict.fromkeys(_BIASES, False)
        unread = {
            key: value
            for key, value in data.items()
            if key not in known and value is not None and (key not in neutral or value != neutral[key])
        }
        if unread:
            found = ", ".join(f"{key!r} = {value!r:.80}" for key, value in list(unread.items())[:16])
            raise UnsupportedError(
                f"{WHERE} has {found}, which is not known of {self.row.name}: what it changes would be lost. "
                "If it changes nothing in the model, remove it there."
            )

    def _check_values(self, data: Mapping[str, Any]) -> None:
        for key, values in {**_ONLY, **self.row.only}.items():
            if data.get(key) is not None and data[key] not in values:
                known = " or ".join(map(repr, values))
                raise UnsupportedError(f"{WHERE}: {key!r} is {data[key]!r:.80}; known is {known} only.")

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        if key not in self.data and default is not None:
            return default
        return int(require(self.data, key, int, WHERE, CheckpointError))

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        if key not in self.data and default is not None:
            return default
        value = require(self.data, key, (int, float), WHERE, CheckpointError)
        if not -1e18 < value < 1e18:
            raise CheckpointError(f"{WHERE}: {key!r} is {value!r:.80}; expected a number up to 1e18.")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        if key not in self.data:
            return default
        return bool(require(self.data, key, bool, WHERE, CheckpointError))


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a Hugging Face config.json (already parsed).

    Raises:
        UnsupportedError: an architecture, an activation, a rope type, or any key that is not known.
        CheckpointError: a value is missing or makes no sense.
    """
    row = architecture_of_hf(config.get("architectures"))
    read = Config(config, row)
    heads, hidden = read.number("num_attention_heads"), read.number("hidden_size")
    head_dim = read.number("head_dim", hidden // max(heads, 1))
    max_context = read.number("max_position_embeddings")
    check_limits(num_heads=heads, hidden_size=hidden, head_dim=head_dim, max_context=max_context)
    experts = _experts(read)
    model = {**row.model, **_layer_inputs(read)}
    if row.scaled_embedding:
        model["embedding_scale"] = hidden**0.5
    layers, ropes = _layers(read, heads, head_dim, experts)
    return ModelSpec(
        architecture=row.name,
        vocab_size=read.number("vocab_size"),
        hidden_size=hidden,
        max_context=max_context,
        norm=NormSpec(epsilon=read.real("rms_norm_eps"), **row.norm),
        attention=_attention(read, heads, head_dim),
        mlp=_mlp(read),
        layers=layers,
        ropes=ropes,
        tie_embeddings=read.flag("tie_word_embeddings"),
        block=_block(read),
        experts=experts,
        **{**model, **_scales(read)},
    )


def _layers(
    read: Config, heads: int, head_dim: int, experts: ExpertsSpec | None
) -> tuple[tuple[LayerSpec, ...], Any]:
    count = read.number("num_hidden_layers")
    inner = read.number(
        "intermediate_size", 4 * read.number("hidden_size") if read.row.name == "gpt2" else None
    )
    check_limits(num_layers=count)
    kinds = layer_kinds(read.data, read.row, count)
    windows = layer_windows(read.data, read.row, kinds)
    kv_heads = read.number("num_key_value_heads", heads)
    sizes = layer_heads(read.data, windows, kv_heads, head_dim)
    ropes, rotations = layer_rotations(read.data, read.row, [size for _, size in sizes], kinds)
    mixed = _expert_layers(read, count) if experts else [False] * count
    owners = cache_owners(windows, read.number("num_kv_shared_layers", 0))
    wide = 2 if read.flag("use_double_wide_mlp") else 1
    return tuple(
        LayerSpec(*size, inner * wide if owner >= 0 else inner, window, rope, mixture, owner)
        for size, window, rope, mixture, owner in zip(sizes, windows, rotations, mixed, owners, strict=True)
    ), ropes


def _layer_inputs(read: Config) -> dict[str, int]:
    """Of Gemma 3n and 4: their table must have a row for each token."""
    size = read.number("hidden_size_per_layer_input", 0)
    rows, vocabulary = read.number("vocab_size_per_layer_input", 0), read.number("vocab_size")
    if size and rows not in (0, vocabulary):
        raise UnsupportedError(
            f"{WHERE}: 'vocab_size_per_layer_input' is {rows}; known is that of all {vocabulary} tokens only."
        )
    return {"layer_inputs": size} if size else {}


def _attention(read: Config, heads: int, head_dim: int) -> AttentionSpec:
    row = read.row
    fixed = dict(row.attention)
    bias = read.flag("attention_bias") or read.flag("use_bias") or read.flag("use_qkv_bias")
    bias = bool(fixed.pop("bias", bias))
    output = not read.flag("use_qkv_bias") and row.name != "qwen2" and bias
    if row.name == "ministral3" and (found := query_temperature(rope_section(read.data))):
        fixed["temperature"], fixed["temperature_context"] = found
    scale = read.real("query_pre_attn_scalar", head_dim) ** -0.5
    return AttentionSpec(
        num_heads=heads,
        scale=read.real("attention_multiplier", scale),
        bias=bias,
        output_bias=read.flag("attention_out_bias", output),
        softcap=read.real("attn_logit_softcapping", 0.0),
        **fixed,
    )


def _mlp(read: Config) -> MlpSpec:
    name = require(read.data, "hidden_act", str, WHERE, CheckpointError)
    if name not in read.row.activations:
        known = ", ".join(read.row.activations)
        raise UnsupportedError(f"{WHERE}: hidden_act is {name!r}; known for {read.row.name}: {known}.")
    activation = _ACTIVATIONS[name]
    if "swiglu_limit" in read.row.reads:
        activation = "swiglu_oai"
    bias = read.flag("mlp_bias") or read.flag("use_bias") or activation == "swiglu_oai"
    parameters = (read.real("swiglu_limit", 7.0),) if activation == "swiglu_oai" else ()
    return MlpSpec(activation, read.row.gated, bias, parameters)


def _block(read: Config) -> str:
    if "use_parallel_residual" not in read.row.reads or not read.flag("use_parallel_residual"):
        return read.row.block
    return "parallel_norms" if read.row.name == "gpt_neox" else "parallel"


def _scales(read: Config) -> dict[str, float]:
    divisor = read.real("logits_scaling", 1.0)
    if divisor <= 0:
        raise CheckpointError(f"{WHERE}: 'logits_scaling' is {divisor}; expected a positive number.")
    scale = read.real("logit_scale", 1.0) / divisor
    found = {
        "embedding_scale": read.real("embedding_multiplier", 1.0),
        "residual_scale": read.real("residual_multiplier", 1.0),
        "logits_scale": scale,
        "logits_softcap": read.real("final_logit_softcapping", 0.0),
    }
    return {name: value for name, value in found.items() if name != "embedding_scale" or value != 1.0}


def _experts(read: Config) -> ExpertsSpec | None:
    count = read.number("num_local_experts", read.number("num_experts", 0))
    if count and read.row.name == "granite_hybrid":
        raise UnsupportedError(f"{WHERE}: num_local_experts is {count}; Granite's experts are not known yet.")
    if not count:
        return None
    return ExpertsSpec(
        count,
        read.number("num_experts_per_tok"),
        read.number("moe_intermediate_size", read.number("intermediate_size")),
        routing=read.row.routing,
        normalize=read.row.routing == "topk_softmax" or read.flag("norm_topk_prob"),
        router_bias=read.row.routing == "topk_softmax",
    )


def _expert_layers(read: Config, count: int) -> list[bool]:
    step = max(read.number("decoder_sparse_step", 1), 1)
    plain = read.data.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise CheckpointError(f"{WHERE}: 'mlp_only_layers' is {plain!r:.80}; expected a list.")
    return [layer not in plain and (layer + 1) % step == 0 for layer in range(count)]
