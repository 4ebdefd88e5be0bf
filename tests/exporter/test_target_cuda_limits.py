"""What ONNX Runtime's attention cannot do is named before any work, and nothing else is."""

from dataclasses import replace
from typing import Any

import pytest

from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.targets.cuda import cuda_obstacles, refuse_obstacles
from pagelet.models.config import spec_from_config
from pagelet.models.errors import UnsupportedError
from pagelet.models.spec import ExpertsSpec, ModelSpec


def changed(spec: ModelSpec, attention: dict[str, Any], layers: dict[str, Any]) -> ModelSpec:
    return replace(
        spec,
        attention=replace(spec.attention, **attention),
        layers=tuple(replace(layer, **layers) for layer in spec.layers),
    )


LLAMA = spec_from_config({
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_attention_heads": 8,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 32,
    "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
})  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "cache", "obstacle"),
    [
        (changed(LLAMA, {"norm": "head", "norm_after_rotation": True}, {}), CacheFormat(256, "f16"),
         "normed after they are rotated"),
        (LLAMA, CacheFormat(256, "f32"), "float32; the op takes f16"),
        (LLAMA, CacheFormat(128, "f16"), r"blocks of 128 tokens; with heads of 64 .* 256 at least"),
        (LLAMA, CacheFormat(768, "f16"), r"blocks of 768 tokens; .* a power of two"),
        (LLAMA, CacheFormat(8, "int8"), "16 at least"),
        (changed(LLAMA, {"sinks": True}, {"head_dim": 512}), CacheFormat(256, "f16"),
         "sinks and 512 elements"),
        (changed(LLAMA, {}, {"head_dim": 72}), CacheFormat(256, "f16"), "64 of 72 elements"),
        (replace(LLAMA, ropes=(replace(LLAMA.ropes[0], rotary_dim=24),)), CacheFormat(256, "f16"),
         "24 of 64 elements of its heads are rotated"),
    ],
)  # fmt: skip
def test_what_the_op_cannot_do_is_named(spec: ModelSpec, cache: CacheFormat, obstacle: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"llama cannot .* target cuda: .*{obstacle}"):
        refuse_obstacles(spec, cache)


def test_all_obstacles_are_named_at_once() -> None:
    mixed = replace(LLAMA, experts=ExpertsSpec(4, 2, 64))
    spec = changed(mixed, {"norm": "head", "norm_after_rotation": True}, {"experts": True})
    assert len(cuda_obstacles(spec, CacheFormat(8, "f32"))) == 4


@pytest.mark.parametrize(
    ("spec", "cache"),
    [
        (LLAMA, CacheFormat(256, "f16")),
        (LLAMA, CacheFormat(16, "fp8")),
        (changed(LLAMA, {"sinks": True, "softcap": 5.0}, {"head_dim": 128, "window": 7}),
         CacheFormat(128, "f16")),
        (changed(LLAMA, {}, {"head_dim": 512}), CacheFormat(64, "f16")),
        (changed(LLAMA, {}, {"head_dim": 72, "rope": -1}), CacheFormat(256, "f16")),
    ],
)  # fmt: skip
def test_what_the_op_can_do_is_not_refused(spec: ModelSpec, cache: CacheFormat) -> None:
    assert cuda_obstacles(spec, cache) == []
    refuse_obstacles(spec, cache)
