"""Checkpoints that are FP8 already: their codes and scales pass through, whatever the scales are for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import uncertified
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagelet.exporter import export
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.runtime import Engine, EngineConfig

MakeCheckpoint = Callable[..., Path]
Tensors = dict[str, torch.Tensor]

# How many rows and columns share a scale; None: all.
TENSOR, CHANNEL, BLOCK = (None, None), (1, None), (128, 128)
SUFFIXES = {TENSOR: "_scale", CHANNEL: "_scale", BLOCK: "_scale_inv"}
METHODS: dict[tuple[int | None, int | None], dict[str, Any]] = {
    TENSOR: {"quant_method": "compressed-tensors", "format": "float-quantized"},
    CHANNEL: {"quant_method": "fbgemm_fp8"},
    BLOCK: {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}


def to_fp8(weight: torch.Tensor, block: tuple[int | None, int | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own rounding: codes [N, K] and scales [row blocks, column blocks], the last maybe cut short."""
    rows, columns = block[0] or weight.shape[0], block[1] or weight.shape[1]
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [N/r, r, K/c, c]
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    return (weight / spread(scales, weight, rows, columns)).to(torch.float8_e4m3fn), scales


def spread(scales: torch.Tensor, weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The scale of every weight."""
    each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return each[: weight.shape[0], : weight.shape[1]]


@pytest.fixture
def make_fp8(make_llama: MakeCheckpoint) -> Callable[..., tuple[Path, Path]]:
    """make_fp8(block): a folder with FP8 layers, and one with the same weights in float32."""

    def make(block: tuple[int | None, int | None]) -> tuple[Path, Path]:
        folder = make_llama(hidden_size=128, intermediate_size=256, initializer_range=0.08, dtype="bfloat16")
        plain = make_llama(hidden_size=128, intermediate_size=256, initializer_range=0.08)
        floats: Tensors = {}
        stored: Tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            floats[name], stored[name] = tensor.float(), tensor
            if name.endswith("proj.weight"):
                codes, scales = to_fp8(tensor.float(), block)
                stored |= {name: codes, name + SUFFIXES[block]: scales}
                rows, columns = block[0] or len(tensor), block[1] or tensor.shape[1]
                floats[name] = codes.float() * spread(scales, codes, rows, columns)
        save_file(stored, folder / "model.safetensors")
        save_file(floats, plain / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = METHODS[block]
        (folder / "config.json").write_text(json.dumps(config))
        return folder, plain

    return make


@pytest.mark.parametrize("block", [TENSOR, CHANNEL, BLOCK])
def test_fp8_passes_through_unchanged(
    block: tuple[int | None, int | None], make_fp8: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, plain = make_fp8(block)
    manifest = export(folder, tmp_path / "b", uncertified(weights="fp8", cache_type="f32"))
    assert all(entry.exact for entry in manifest.tensors.values())
    assert manifest.tensors["layers.0.mlp.down"].group_size == (block[1] or 0)
    assert manifest.tensors["embedding"].type == "bf16"
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    ids = np.random.default_rng(1).integers(2, 258, 100).tolist()
    with torch.no_grad():
        expected = np.asarray(model(torch.tensor([ids])).logits[0])
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="16MiB")) as engine:
        # Floats times floats: only the order of some hundred sums is another.
        assert np.abs(engine.logits(ids) - expected).max() <= 2e-3


@pytest.mark.parametrize("block", [TENSOR, CHANNEL, BLOCK])
def test_fp8_is_read_as_floats(
    block: tuple[int | None, int | None], make_fp8: Callable[..., tuple[Path, Path]]
) -> None:
    folder, plain = make_fp8(block)
    with open_checkpoint(folder) as fp8, open_checkpoint(plain) as floats:
        for role, info in floats.weights.items():
            for start, stop in ((0, info.shape[0]), (3, 7)):
                np.testing.assert_array_equal(fp8.read(role, start, stop), floats.read(role, start, stop))


NAME = "model.layers.1.mlp.up_proj.weight"


def without(tensors: Tensors) -> None:
    del tensors[NAME + "_scale_inv"]


def wrong_shape(tensors: Tensors) -> None:
    tensors[NAME + "_scale_inv"] = torch.ones(3, 1)


def not_finite(tensors: Tensors) -> None:
    tensors[NAME + "_scale_inv"][0, 0] = torch.nan


def empty(tensors: Tensors) -> None:
    tensors[NAME + "_scale_inv"] = torch.zeros(0, 1)


def too_large(tensors: Tensors) -> None:
    tensors[NAME + "_scale_inv"][0, 0] = 1e36


def wrong_dtype(tensors: Tensors) -> None:
    tensors[NAME + "_scale_inv"] = tensors[NAME + "_scale_inv"].to(torch.float8_e4m3fn)


def nan_code(tensors: Tensors) -> None:
    tensors[NAME].view(torch.uint8)[5, 6] = 0x7F


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without, "up_proj.weight is F8_E4M3 .* with 0 scale tensors"),
        (wrong_shape, r"weight_scale_inv has shape \[3, 1\]; expected one value, \[256, 1\] or \[2, 1\]"),
        (not_finite, "weight_scale_inv holds NaN"),
        (empty, r"weight_scale_inv has shape \[0, 1\]: it holds no scales"),
        (too_large, "weight_scale_inv holds the scale 1e.36, which makes weights beyond float32"),
        (wrong_dtype, "weight_scale_inv has dtype F8_E4M3"),
        (nan_code, "up_proj.weight: codes or scales hold NaN"),
    ],
)
def test_damage_is_named(
    damage: Callable[[Tensors], None],
    message: str,
    make_fp8: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    folder, _ = make_fp8(BLOCK)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        export(folder, tmp_path / "b", uncertified(weights="fp8"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "quantized already .'aqlm'."),
        ({}, None),
        ("fp8", "quantized already .'fp8'."),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "rotation": "hadamard"}, "unknown key 'rotation'"),
    ],
)
def test_other_quantized_weights_are_refused(
    settings: Any, message: str | None, make_fp8: Callable[..., tuple[Path, Path]]
) -> None:
    folder, _ = make_fp8(CHANNEL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    # Without settings the weights are taken for plain ones, and are none.
    with pytest.raises(CheckpointError if message is None else UnsupportedError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("size", [[0, 128], [128], "128", [True, 1]])
def test_a_block_size_that_makes_no_sense(size: Any, make_fp8: Callable[..., tuple[Path, Path]]) -> None:
    folder, _ = make_fp8(BLOCK)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = size
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="weight_block_size is"):
        open_checkpoint(folder)
