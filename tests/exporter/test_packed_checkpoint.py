"""Whole checkpoints with AWQ and GPTQ weights: codes pass through, and numbers are the model's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
from exporting import uncertified
from safetensors.numpy import load_file, save_file

from pagelet.exporter import export
from pagelet.exporter.checkpoint import Checkpoint, open_checkpoint
from pagelet.exporter.weights import stacked
from pagelet.models.errors import CheckpointError
from pagelet.plugins import packing
from pagelet.plugins.packing import LinearFormat
from pagelet.runtime import Engine, EngineConfig

MakeCheckpoint = Callable[..., Path]
Codes = dict[str, np.ndarray[Any, Any]]
Config = dict[str, Any]

FORMS: dict[str, Config] = {
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False},
    "gptq-sym": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "desc_act": True, "sym": False},
}
MODULES = {"layers.0.attention.o": "self_attn.o_proj", "layers.0.mlp.down": "mlp.down_proj"}


def write(folder: Path, plain: Path, form: str, group: int) -> Codes:
    """Quantizes the layers of `folder`, and puts what they then are into `plain`; the codes by name."""
    rng = np.random.default_rng(0)
    tensors = load_file(folder / "model.safetensors")
    stored, floats, all_codes = {}, dict(tensors), {}
    for name, weight in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        rows, inputs = weight.shape
        index = np.arange(inputs, dtype=np.int32) // group
        if form == "gptq-order":
            index = rng.permutation(index)
        scales = np.empty((rows, inputs // group), np.float16)
        zeros = np.full(scales.shape, 8)
        for number in range(inputs // group):
            part = weight[:, index == number]
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            if form == "gptq-sym":
                scales[:, number] = np.abs(part).max(1) / 7
            else:
                scales[:, number] = (high - low) / 15
                zeros[:, number] = np.rint(-low / scales[:, number].astype(np.float32))
        codes = (
            np.rint(weight / scales.astype(np.float32)[:, index] + zeros[:, index]).clip(0, 15).astype(int)
        )
        parts = packers.awq(codes, zeros, scales) if form == "awq" else packers.gptq(codes, zeros, scales)
        if form == "gptq-order":
            parts["g_idx"] = index
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": array for part, array in parts.items()}
        floats[name] = packers.dequantized(codes, zeros, scales, index)
        all_codes[module.removeprefix("model.layers.")] = codes
    save_file(stored, folder / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FORMS[form] | {"group_size": group}
    (folder / "config.json").write_text(json.dumps(config))
    return all_codes


@pytest.fixture
def make_packed(make_llama: MakeCheckpoint) -> Callable[[str, int], tuple[Path, Path, Codes]]:
    """make_packed(form, group): such a folder, one with the same weights in float32, and the codes."""

    def make(form: str, group: int) -> tuple[Path, Path, Codes]:
        folder, plain = (make_llama(hidden_size=128, intermediate_size=256) for _ in range(2))
        return folder, plain, write(folder, plain, form, group)

    return make


def stored_codes(checkpoint: Checkpoint, module: str, format: LinearFormat) -> tuple[Any, bool, bool]:
    """The codes that go into the file, and whether they and their numbers are the checkpoint's own."""
    rows = stacked(checkpoint, module, (module,), format)
    packed = np.concatenate(list(rows.pieces()))
    return packing.unpack(packed, rows.width, rows.count, format)[0], rows.kept, rows.exact


@pytest.mark.parametrize("form", ["awq", "gptq", "gptq-sym"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_codes_pass_through(form: str, group: int, make_packed: Any) -> None:
    folder, _, codes = make_packed(form, group)
    symmetric = form == "gptq-sym"
    with open_checkpoint(folder) as checkpoint:
        for finer in (size for size in (32, 64, 128) if size <= group):
            format = LinearFormat(4, finer, asymmetric=True)
            for module, name in MODULES.items():
                found, kept, exact = stored_codes(checkpoint, module, format)
                np.testing.assert_array_equal(found, codes[f"0.{name}"])
                assert kept
                assert exact == symmetric  # else the minimums are rounded to FP16
            if symmetric:
                halves = LinearFormat(4, finer, asymmetric=False)
                found, _, exact = stored_codes(checkpoint, "layers.0.mlp.down", halves)
                np.testing.assert_array_equal(found, codes["0.mlp.down_proj"])
                assert exact


@pytest.mark.parametrize("form", ["awq", "gptq", "gptq-order"])
def test_logits_are_those_of_the_dequantized_weights(form: str, make_packed: Any, tmp_path: Path) -> None:
    folder, plain, _ = make_packed(form, 32)
    logits = []
    ids = np.random.default_rng(1).integers(2, 258, 60).tolist()
    for source in (folder, plain):
        export(source, tmp_path / source.name, uncertified(weights="fp32", cache_type="f32"))
        with Engine.open(tmp_path / source.name, EngineConfig(kv_memory="16MiB")) as engine:
            logits.append(engine.logits(ids))
    np.testing.assert_array_equal(*logits)  # the same float32 weights in the same graph


@pytest.mark.parametrize(
    ("form", "name", "words"),
    [
        ("gptq-sym", "quantize_config.json", {}),
        ("awq", "quant_config.json", {"bits": "w_bit", "group_size": "q_group_size"}),
    ],
)
def test_settings_in_a_file_of_their_own(
    form: str, name: str, words: dict[str, str], make_packed: Any
) -> None:
    folder, _, _ = make_packed(form, 32)
    with open_checkpoint(folder) as checkpoint:
        expected = {role: checkpoint.read(role) for role in checkpoint.weights}
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name).write_text(json.dumps({words.get(key, key): value for key, value in settings.items()}))
    with open_checkpoint(folder) as checkpoint:
        for role, values in expected.items():
            np.testing.assert_array_equal(checkpoint.read(role), values)
    (folder / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(folder)


def test_an_export_keeps_the_groups_of_its_checkpoint(make_packed: Any, tmp_path: Path) -> None:
    folder, _, _ = make_packed("awq", 128)
    notes: list[str] = []
    manifest = export(folder, tmp_path / "own", uncertified(quantizer="gptq"), on_note=notes.append)
    layers = [entry for name, entry in manifest.tensors.items() if name.startswith("layers")]
    assert {entry.group_size for entry in layers} == {128}
    assert all(0 < entry.error < 2.0**-10 for entry in layers)  # of the minimums in FP16
    assert not any("again" in note for note in notes)
    assert any("nothing is quantized" in note for note in notes)


@pytest.mark.parametrize(
    ("form", "options", "reason"),
    [
        (
            "awq",
            {"symmetric": True},
            "they are int4, groups of 64 with minimum; int4, groups of 64 is asked for",
        ),
        (
            "awq",
            {"group_size": 128},
            "groups of 64 with minimum; int4, groups of 128 with minimum is asked for",
        ),
        ("gptq-order", {}, "its groups are scattered .act-order."),
        ("awq", {"weights": "fp8"}, "fp8, a scale per output is asked for"),
    ],
)
def test_codes_that_do_not_fit_are_named(
    form: str, options: dict[str, Any], reason: str, make_packed: Any, tmp_path: Path
) -> None:
    folder, _, _ = make_packed(form, 64)
    notes: list[str] = []
    export(folder, tmp_path / "b", uncertified(**options), on_note=notes.append)
    (note,) = (note for note in notes if "quantized again" in note)
    assert "codes of 14 weights" in note
    assert reason.replace(".act-order.", "(act-order)") in note


def test_a_weight_that_stands_twice(make_packed: Any) -> None:
    folder, plain, _ = make_packed("awq", 32)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: load_file(plain / "model.safetensors")[name]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.weight is in the files twice"):
        open_checkpoint(folder)


def test_other_tensors_beside_packed_ones_are_unexpected(make_packed: Any) -> None:
    folder, _, _ = make_packed("awq", 32)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.g_idx"] = np.zeros(256, np.int32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.g_idx is unexpected"):
        open_checkpoint(folder)
