"""A GGUF file's metadata read as a Hugging Face config, so that there is one road to a ModelSpec."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.architectures import architecture_of_gguf
from pagelet.models.config import spec_from_config
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.names import GGUF_NAMES
from pagelet.models.spec import ModelSpec
from pagelet.models.strict import reject_unknown, require
from pagelet.models.weight_shapes import source_name

# Keys under "{architecture}." that are read, and those that do not change what the model computes.
_READ = (
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
)  # fmt: skip
_HARMLESS = (
    "vocab_size", "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned",
)  # fmt: skip
_EXPERTS = ("expert_count", "expert_used_count")


class _Section:
    """The keys under "{architecture}.", each checked for its type."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._where = where
        self.architecture: str = require(dict(metadata), "general.architecture", str, where, CheckpointError)
        prefix = self.architecture + "."
        self._data = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}

    def check_known(self) -> None:
        where = f"{self._where}: {self.architecture}.*"
        experts = [key for key in _EXPERTS if self._data.get(key)]
        if experts:
            raise UnsupportedError(
                f"{where}: {experts[0]} is {self._data[experts[0]]}; mixtures of experts are not known."
            )
        reject_unknown(self._data, (*_READ, *_HARMLESS, *_EXPERTS), where, UnsupportedError)

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, str, default))

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, int, default))

    def positive(self, key: str, default: float | None = None) -> float:
        value = float(self._get(key, (int, float), default))
        if not 0 < value < math.inf:
            raise CheckpointError(
                f"{self._where}: {self.architecture}.{key} is {value}; expected a positive number."
            )
        return value

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        if key not in self._data and default is not None:
            return default
        return require(self._data, key, kind, f"{self._where}: {self.architecture}.*", CheckpointError)


def spec_from_metadata(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], where: str
) -> ModelSpec:
    """The model that a GGUF file describes; its head is tied when there is no `output.weight`.

    Raises:
        CheckpointError: a key is missing or makes no sense.
        UnsupportedError: an architecture, or a key of one, that is not known.
    """
    section = _Section(metadata, where)
    row = architecture_of_gguf(section.architecture)
    section.check_known()
    embedding = tensors.get(source_name("embedding.weight", GGUF_NAMES))
    heads, hidden = section.integer("attention.head_count"), section.integer("embedding_length")
    head_dim = section.integer("attention.key_length", hidden // max(heads, 1))
    if section.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{where}: keys and values have different lengths, which is not known.")
    config = {
        "architectures": list(row.hf_classes),
        "hidden_act": row.activations[0],
        "vocab_size": embedding.shape[0] if embedding else len(metadata.get("tokenizer.ggml.tokens", ())),
        "hidden_size": hidden,
        "intermediate_size": section.integer("feed_forward_length"),
        "num_hidden_layers": section.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": section.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": section.integer("context_length"),
        "rms_norm_eps": section.positive("attention.layer_norm_rms_epsilon"),
        "rope_theta": section.positive("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(section),
        "tie_word_embeddings": source_name("head.weight", GGUF_NAMES) not in tensors,
        "attention_bias": source_name("layers.0.attention.q.bias", GGUF_NAMES) in tensors,
        "mlp_bias": source_name("layers.0.mlp.gate.bias", GGUF_NAMES) in tensors,
    }
    optional = ("attention_bias", "mlp_bias")
    spec = spec_from_config(
        {key: value for key, value in config.items() if key not in optional or key in row.reads}
    )
    rotary_dim = section.integer("rope.dimension_count", head_dim)
    if row.gguf_permutes_rotary and rotary_dim != head_dim:
        # Whole heads are permuted, so the pairs of a partial rotation would not come out right.
        raise UnsupportedError(
            f"{where}: only {rotary_dim} of {head_dim} elements are rotated, which is not known."
        )
    ropes = tuple(dataclasses.replace(rope, rotary_dim=rotary_dim) for rope in spec.ropes)
    return dataclasses.replace(spec, ropes=ropes)


def _scaling(section: _Section) -> dict[str, Any] | None:
    factor = section.positive("rope.scaling.factor", section.positive("rope.scale_linear", 1.0))
    kind = section.text("rope.scaling.type", "none" if factor == 1.0 else "linear")
    return None if kind == "none" else {"rope_type": kind, "factor": factor}
