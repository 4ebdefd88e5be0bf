"""The language model inside a checkpoint that can also see or hear: its config, and its tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError, UnsupportedError

# config.json's `model_type` of the language model, and its class.
_TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
}
# What wraps one: older checkpoints, and newer ones.
_WRAPPERS = ("ForConditionalGeneration",)
_RENAMED = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PARTS = (
    "vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.",
    "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
)  # fmt: skip
# Some checkpoints of the base model leave its name out.
_BASES = {"GPT2LMHeadModel": "transformer."}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's config.json, of a model that wraps one; any other as it is.

    Raises:
        CheckpointError: a wrapper without a `text_config`.
        UnsupportedError: it wraps a language model that is not known.
    """
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else ""
    if not str(name).endswith(_WRAPPERS):
        return config
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


def text_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], list[str]]:
    """The language model's tensors by the names that they would have alone, and what the user should know."""
    classes = config.get("architectures") or [""]
    base = _BASES.get(str(classes[0]), "")
    if base and not any(name.startswith(base) for name in tensors):
        return {
            base + name if not name.startswith("lm_head.") else name: info for name, info in tensors.items()
        }, []
    if not str(classes[0]).endswith(_WRAPPERS):
        return dict(tensors), []
    kept = {}
    for name, info in tensors.items():
        new = next((to + name[len(old) :] for old, to in _RENAMED.items() if name.startswith(old)), name)
        if not new.startswith(_OTHER_PARTS):
            kept[new] = replace(info, name=new)
    left = len(tensors) - len(kept)
    note = f"only the language model is exported: {left} tensors that see or hear are left out."
    return kept, [note] if left else []
