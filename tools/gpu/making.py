"""A bundle of a tiny random model, made on this machine: the whole way from a checkpoint to text."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pagelet.exporter import ExportOptions, export
from pagelet.tools.gpu.report import Row
from pagelet.tools.made_up import write_checkpoint

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
# With scales where the cache is ours: one more pair of arrays that must be written in place.
_CACHES = {"cuda": "f16", "rtx": "int8", "tensorrt": "int8"}


def check_making(target: str, sm: int, bundle: Path) -> Row:
    """Export into the new folder `bundle`, and build the engine where the target has one."""
    options = ExportOptions(
        target=target,
        sms=() if target == "cuda" else (sm,),
        weights="fp16",
        cache_type=_CACHES[target],
        certificate_seconds=5,
    )
    with tempfile.TemporaryDirectory(prefix="pagelet-checkpoint-") as folder:
        write_checkpoint(Path(folder), _SHAPE)
        export(Path(folder), bundle, options)
    detail = "exported"
    if target == "tensorrt":
        from pagelet.runtime.engine_building import build_bundle

        build_bundle(bundle, sm=sm)
        detail = "exported, and its engine built"
    return Row(f"make/{target}", "ok", f"a tiny model, {detail}")
