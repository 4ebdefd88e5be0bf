"""A GGUF file's metadata read as a Hugging Face config, so that there is one road to a ModelSpec."""

from collections.abc import Mapping
from typing import Any

from pagelet.exporter.checkpoint.gguf_families import COMMON_KEYS, GGUFFamily, family_of
from pagelet.exporter.checkpoint.gguf_rope import (
    ROPE_KEYS,
    ROPE_KEYS_OF_WINDOWS,
    ROPE_ONLY,
    Factors,
    rope_parameters,
    with_factors,
)
from pagelet.exporter.checkpoint.gguf_section import Section
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.architectures import Architecture, architecture_by_name
from pagelet.models.config import spec_from_config
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.names import Names
from pagelet.models.spec import LIMITS, ModelSpec
from pagelet.models.weight_shapes import source_name

_HEADS = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
_INNER, _SHARED = "feed_forward_length", "attention.shared_kv_layers"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
# These do not change what the model computes.
_HARMLESS = ("vocab_size", "tensor_data_layout", "expert_used_count", "rope.scaling.finetuned")
# Of every family, unless it reads them.
_ONLY = {"attention.causal": True, "expert_count": 0, **ROPE_ONLY}
# The bias that a key of config.json stands for; the file just has it or not.
_BIASES = {
    "attention_bias": "attention.q", "use_qkv_bias": "attention.q", "attention_out_bias": "attention.o",
    "mlp_bias": "mlp.up", "use_bias": "mlp.up",
}  # fmt: skip


def spec_from_metadata(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], factors: Factors, where: str
) -> tuple[ModelSpec, GGUFFamily]:
    """The model that a GGUF file describes, and its family; without `output.weight` its head is tied.

    Raises:
        CheckpointError: a key is missing or makes no sense.
        UnsupportedError: an architecture, or a key of one, that is not known.
    """
    section = Section(metadata, where)
    family = family_of(section.architecture, section.present())
    row = architecture_by_name(family.architecture)
    epsilon = f"attention.layer_norm_{'' if row.norm.get('type') == 'layer' else 'rms_'}epsilon"
    _check_known(section, family, epsilon)
    if "attention_k_eq_v" in row.reads:
        _check_values(tensors, section.where)
    heads, hidden = section.integer("attention.head_count"), section.integer("embedding_length")
    head_dim = section.integer("attention.key_length", hidden // max(heads, 1))
    _check_lengths(section, head_dim)
    layers = section.integer("block_count")
    embedding = tensors.get(source_name("embedding.weight", family.names))
    config = {
        "architectures": list(row.hf_classes),
        "hidden_act": row.activations[0],
        "vocab_size": embedding.shape[0] if embedding else len(metadata.get("tokenizer.ggml.tokens", ())),
        **{key.config: section.integer(name) for name, key in COMMON_KEYS.items()},
        **_inner_sizes(section, layers),
        "num_key_value_heads": section.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": section.positive(epsilon),
        "rope_parameters": rope_parameters(section, family, factors, head_dim),
        "tie_word_embeddings": source_name("head.weight", family.names) not in tensors,
        **_biases(row, family.names, tensors),
        **family.values,
        **section.values(family.keys),
    }
    if family.windows:
        config |= _windows(section, row, layers)
    if family.wide_scale:
        config["query_pre_attn_scalar"] = hidden // max(heads, 1) if layers == family.wide_scale else head_dim
    spec = _spec({row.keys.get(key, key): value for key, value in config.items()}, where)
    return spec if family.two_kinds else with_factors(spec, factors, where), family


def _spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    try:
        return spec_from_config(config)
    except CheckpointError as error:
        raise type(error)(f"{where}, read as a config.json: {error}") from error


def _check_known(section: Section, family: GGUFFamily, epsilon: str) -> None:
    read = {*COMMON_KEYS, _INNER, *_HEADS, epsilon, *ROPE_KEYS, *family.keys}
    if family.windows:
        read |= {_WINDOW, _PATTERN}
    if family.two_kinds:
        read |= {"attention.value_length_swa", *ROPE_KEYS_OF_WINDOWS}
    only = {**_ONLY, **family.only}
    section.check(
        (*read, *family.unused, *_HARMLESS), {key: only[key] for key in only if key not in family.keys}
    )
    section.need(family.needs)


def _check_lengths(section: Section, head_dim: int) -> None:
    own = section.integer("attention.key_length_swa", head_dim)
    for key, length in (("attention.value_length", head_dim), ("attention.value_length_swa", own)):
        if section.integer(key, length) != length:
            raise UnsupportedError(
                f"{section.where}: keys and values have different lengths, which is not known."
            )


def _check_values(tensors: Mapping[str, TensorInfo], where: str) -> None:
    """The larger Gemma 4 take a layer's keys for its values too."""
    for name in tensors:
        if name.endswith(".attn_k.weight") and name.replace("attn_k", "attn_v") not in tensors:
            raise UnsupportedError(
                f"{where}: {name} is there and no attn_v beside it: attention_k_eq_v is not known."
            )


def _inner_sizes(section: Section, count: int) -> dict[str, Any]:
    """Of the MLPs; those of layers that share a cache may be twice as wide."""
    sizes, shared = section.integers(_INNER), section.integer(_SHARED, 0)
    own = len(sizes) - shared
    if 0 < own < len(sizes) == count and sizes == [sizes[0]] * own + [2 * sizes[0]] * shared:
        return {"intermediate_size": sizes[0], "use_double_wide_mlp": True}
    return {"intermediate_size": section.integer(_INNER)}


def _biases(row: Architecture, names: Names, tensors: Mapping[str, TensorInfo]) -> dict[str, bool]:
    return {
        key: source_name(f"layers.0.{stem}.bias", names) in tensors
        for key, stem in _BIASES.items()
        if key in row.reads
    }


def _windows(section: Section, row: Architecture, count: int) -> dict[str, Any]:
    """config.json's keys. The file has a flag for each layer, or a number: of so many the last has none."""
    window = section.integer(_WINDOW, 0)
    given = section.layers(_PATTERN)
    if isinstance(given, list):
        flags = given
        if len(flags) != count:
            raise CheckpointError(f"{section.where}: {_PATTERN} has {len(flags)} flags for {count} layers.")
    else:
        every = row.full_every if given is None else given
        flags = [every < 1 or (layer + 1) % every != 0 for layer in range(min(count, LIMITS["num_layers"]))]
    kinds = ["sliding_attention" if here and window else "full_attention" for here in flags]
    if "layer_types" in row.reads:
        return {"sliding_window": window or None, "layer_types": kinds}
    if len({*kinds}) > 1:
        raise UnsupportedError(f"{section.where}: {row.name} has windows in all layers or in none.")
    return {"sliding_window": window if "sliding_attention" in kinds and window else None}
