"""The language model's config.json inside that of a model that can also see or hear."""

from collections.abc import Mapping
from typing import Any

from pagelet.models.errors import CheckpointError, UnsupportedError

# config.json's `model_type` of the language model, and its class.
_TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
}


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a model that wraps a language model."""
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else ""
    return str(first).endswith("ForConditionalGeneration")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's config.json, of a model that wraps one; any other as it is.

    Raises:
        CheckpointError: a wrapper without a `text_config`.
        UnsupportedError: it wraps a language model that is not known.
    """
    if not is_wrapper(config):
        return config
    name = config["architectures"][0]
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise CheckpointError(f"config.json: {name} has no 'text_config'; it must be there.")
    kind = inner.get("model_type")
    if not isinstance(kind, str) or kind not in _TEXT_CLASSES:
        known = ", ".join(_TEXT_CLASSES)
        raise UnsupportedError(f"config.json: the language model of {name} is {kind!r:.80}; known: {known}.")
    # The wrapper's word counts: it is what ties them.
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    return {**inner, **outer, "architectures": [_TEXT_CLASSES[kind]]}
