"""Largest magnitudes against transformers' own modules and its own cache, family by family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.conftest import write_family
from families.rows import ROWS, Row
from folding import job_in, write
from transformers import DynamicCache

from pagelet.exporter.calibration.ranges import Ranges, measure_ranges
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.formats import Formats
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.modules import is_routed, linear_units
from pagelet.exporter.quantize.quantizer import RoundToNearest
from pagelet.models.errors import CheckpointError
from pagelet.models.spec import ModelSpec
from pagelet.plugins.float_packing import FloatFormat

# Longer and shorter than the rows' windows; one token alone.
TEXTS = [
    np.random.default_rng(seed).integers(2, 258, length).tolist() for seed, length in enumerate((40, 1, 9))
]
# Some hundred float32 products in another order, relative to the largest number of all.
TOLERANCE = 1e-4
FAMILIES = (
    "llama yarn", "ministral3", "qwen3 bias", "gemma2", "gemma4", "phi4 partial", "smollm3", "granite",
    "olmo2", "gpt_oss", "qwen3_moe mixed", "gpt_neox", "gpt2", "stablelm parallel", "cohere2", "exaone4",
    "hunyuan", "nanochat",
)  # fmt: skip
# What transformers calls them, in any family; the part of a layer where the name alone does not tell.
NAMES = {
    "attention.qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"),
    "attention.o": ("o_proj", "attention.dense", "attn.c_proj"),
    "mlp.up": ("gate_proj", "up_proj", "gate_up_proj", "c_fc", "dense_h_to_4h", "mlp.fc1"),
    "mlp.down": ("down_proj", "mlp.c_proj", "dense_4h_to_h", "mlp.fc2"),
    "inputs.gate": ("per_layer_input_gate",),
    "inputs.projection": ("per_layer_projection",),
    "layer_inputs.projection": ("per_layer_model_projection",),
    "head": ("lm_head", "embed_out"),
}


def measured(folder: Path, home: Path, max_context: int = 64) -> tuple[Ranges, ModelSpec]:
    """Of the model in float32, with a cache that loses nothing."""
    formats = Formats(FloatFormat("f32"), FloatFormat("f32"))
    with open_checkpoint(folder) as checkpoint:
        job = job_in(home, checkpoint)
        part = write(job, formats, RoundToNearest(job.spec, formats))
    return measure_ranges(Layerwise(Texts.of(TEXTS), CacheFormat(32, "f32")), part), part.spec


def module_of(name: str, gated: bool) -> str:
    """The module of ours that transformers' linear layer of a dotted name belongs to; "" for none."""
    for module, endings in NAMES.items():
        if name.endswith(endings) and ".experts." not in name:
            layer = next((part for part in name.split(".") if part.isdigit()), None)
            ours = "mlp.gate_up" if module == "mlp.up" and gated else module
            return f"layers.{layer}.{ours}" if layer is not None else ours
    return ""


def expected(model: Any, spec: ModelSpec) -> tuple[dict[str, float], dict[int, tuple[float, float]]]:
    """What transformers' linear layers are called with, and what its cache holds behind each text."""
    inputs: dict[str, float] = {}
    caches: dict[int, tuple[float, float]] = {}

    def note(module: str) -> Callable[..., None]:
        def hook(_: Any, args: Any) -> None:
            inputs[module] = max(inputs.get(module, 0.0), args[0].abs().max().item())

        return hook

    for name, layer in model.named_modules():
        ours = module_of(name, spec.mlp.gated)
        if ours and type(layer).__name__ in ("Linear", "Conv1D"):
            layer.register_forward_pre_hook(note(ours))
    with torch.no_grad():
        for text in TEXTS:
            cache: Any = DynamicCache()  # without a config it forgets nothing outside a window
            model(torch.tensor([text]), past_key_values=cache, use_cache=True)
            for index, layer in enumerate(spec.cache_owners):
                held = cache.layers[index]
                pair = held.keys.abs().max().item(), held.values.abs().max().item()
                earlier = caches.get(layer, (0.0, 0.0))
                caches[layer] = max(pair[0], earlier[0]), max(pair[1], earlier[1])
    return inputs, caches


# Its new name is known to some families only.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_ranges_are_those_of_transformers(
    name: str, tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    model = write_family(ROWS[name], tmp_path / "source")
    byte_tokenizer(tmp_path / "source")
    found, spec = measured(tmp_path / "source", tmp_path / "part")
    inputs, caches = expected(model, spec)
    ours = {"head" if module == "embedding" else module for module, _ in linear_units(spec)}
    ours = {module for module in ours if not is_routed(module) and not module.endswith("layer_inputs.table")}
    assert set(found.inputs) == ours
    assert set(found.caches) == set(spec.cache_owners)
    for module in ours:
        assert found.inputs[module] == pytest.approx(inputs[module], rel=TOLERANCE), module
    for layer, pair in found.caches.items():
        assert pair == pytest.approx(caches[layer], rel=TOLERANCE), layer


def test_scales_reach_the_largest_code() -> None:
    ranges = Ranges({"head": 896.0, "layers.0.mlp.down": 0.0}, {0: (254.0, 448.0)})
    assert ranges.input_scale("head") == 2.0
    assert ranges.input_scale("layers.0.mlp.down") == 1.0  # only zeros: no division by a scale of 0
    assert ranges.cache_scales(0, "int8") == (2.0, 448 / 127)
    assert ranges.cache_scales(0, "fp8") == (254 / 448, 1.0)


@pytest.mark.parametrize(
    ("role", "where"), [("down", r"layers\.1\.attention\.qkv"), ("v", r"layers\.0\.values")]
)
def test_infinity_is_named(
    role: str, where: str, tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    """Finite weights, each; their products are beyond float32."""
    row = Row("Llama", {"num_hidden_layers": 2})
    model = write_family(row, tmp_path / "source")
    with torch.no_grad():
        layer = model.model.layers[0]
        (layer.mlp.down_proj if role == "down" else layer.self_attn.v_proj).weight.fill_(3e38)
    model.save_pretrained(tmp_path / "source")
    byte_tokenizer(tmp_path / "source")
    with pytest.raises(CheckpointError, match=where):
        measured(tmp_path / "source", tmp_path / "part")


def test_progress_is_told(tmp_path: Path, byte_tokenizer: Callable[[Path], None]) -> None:
    write_family(Row("Llama", {"num_hidden_layers": 1}), tmp_path / "source")
    byte_tokenizer(tmp_path / "source")
    formats = Formats(FloatFormat("f32"), FloatFormat("f32"))
    with open_checkpoint(tmp_path / "source") as checkpoint:
        job = job_in(tmp_path / "part", checkpoint)
        part = write(job, formats, RoundToNearest(job.spec, formats))
    told: list[tuple[int, int, str]] = []
    run = Layerwise(Texts.of(TEXTS), CacheFormat(32, "f32"))
    measure_ranges(run, part, on_progress=lambda *step: told.append(step))
    assert told == [(0, 3, "embedding"), (1, 3, "layers.0"), (2, 3, "head"), (3, 3, "")]
