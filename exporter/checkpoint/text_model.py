"""The tensors of the language model inside a checkpoint that can also see or hear."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.wrapped_config import is_wrapper

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
    if not is_wrapper(config):
        return dict(tensors), []
    kept = {}
    for name, info in tensors.items():
        new = next((to + name[len(old) :] for old, to in _RENAMED.items() if name.startswith(old)), name)
        if not new.startswith(_OTHER_PARTS):
            kept[new] = replace(info, name=new)
    left = len(tensors) - len(kept)
    note = f"only the language model is exported: {left} tensors that see or hear are left out."
    return kept, [note] if left else []
