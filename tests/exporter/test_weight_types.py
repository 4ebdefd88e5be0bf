"""Every weight type, start to end: its logits are transformers' with the same rounded weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import uncertified
from transformers import AutoModelForCausalLM

from pagelet.exporter import ExportOptions, export
from pagelet.exporter import options as exporter_options
from pagelet.exporter.stacked_rows import WeightFormat
from pagelet.models.errors import CheckpointError, InputError
from pagelet.models.manifest import Manifest
from pagelet.plugins import float_packing, packing
from pagelet.plugins.float_packing import FloatFormat
from pagelet.plugins.packing import LinearFormat
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.cli import export as command

MakeCheckpoint = Callable[..., Path]

F16, BF16, F32 = FloatFormat("f16"), FloatFormat("bf16"), FloatFormat("f32")
# weight type, group size -> formats of the layers and of the tables
PLAIN = [("fp32", None, F32, F32), ("fp16", None, F16, F16), ("bf16", None, BF16, BF16)]
FP8 = [("fp8", size, FloatFormat("fp8", size or 0), F16) for size in (None, 32, 64)]
INT8 = [
    ("int8", size, LinearFormat(8, size or 32, False), LinearFormat(8, size or 32, False))
    for size in (None, 64)
]


def rounded(weight: np.ndarray[Any, Any], format: WeightFormat) -> np.ndarray[Any, Any]:
    if isinstance(format, FloatFormat):
        return float_packing.dequantize(*float_packing.quantize(weight, format), format)
    return packing.dequantize(*packing.quantize_rtn(weight, format), format)


def logits_of(checkpoint: Path, ids: list[int], layers: WeightFormat, tables: WeightFormat) -> Any:
    """transformers', with every matrix replaced by what its storage holds."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            format = tables if "embed_tokens" in name or "lm_head" in name else layers
            parameter.data = torch.from_numpy(rounded(parameter.detach().numpy(), format))
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0])


@pytest.mark.parametrize(("weights", "group_size", "layers", "tables"), [*PLAIN, *FP8, *INT8])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True, "attention_bias": True}])
def test_logits_equal_transformers_with_the_stored_weights(
    weights: str,
    group_size: int | None,
    layers: WeightFormat,
    tables: WeightFormat,
    options: dict[str, Any],
    make_llama: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    checkpoint = make_llama(hidden_size=128, intermediate_size=192, initializer_range=0.08, **options)
    exported = uncertified(weights=weights, group_size=group_size, cache_type="f32")
    export(checkpoint, tmp_path / "b", exported)
    ids = np.random.default_rng(1).integers(2, 258, 100).tolist()
    expected = logits_of(checkpoint, ids, layers, tables)
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="16MiB")) as engine:
        found = engine.logits(ids)
    if isinstance(layers, FloatFormat):
        # Floats times floats: only the order of some hundred sums is another.
        assert np.abs(found - expected).max() <= 2e-3
    else:
        # INT8 activations carry an error of about 1/254 of each block's largest value: some percent of the
        # logits' spread after a few layers.
        assert np.abs(found - expected).mean() <= 0.03 * expected.std()


def stored(bundle: Path, manifest: Manifest, module: str, format: FloatFormat) -> np.ndarray[Any, Any]:
    """The numbers of a matrix in the bundle, as the format's dtype."""
    import onnx

    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    tensor = next(tensor for tensor in graph.initializer if tensor.name == module + ".weight")
    place = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
    rows, columns = manifest.tensors[module].shape
    data = (bundle / "model.weights").read_bytes()[place["offset"] : place["offset"] + place["length"]]
    return float_packing.unpack(np.frombuffer(data, np.uint8), columns, rows, format)[0]


@pytest.mark.parametrize(
    ("dtype", "weights", "format"), [("bfloat16", "bf16", BF16), ("float16", "fp16", F16)]
)
def test_16_bits_pass_through_unchanged(
    dtype: str, weights: str, format: FloatFormat, make_llama: MakeCheckpoint, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    checkpoint = make_llama(dtype=dtype)
    manifest = export(checkpoint, tmp_path / "b", uncertified(weights=weights))
    assert all(entry.exact and entry.type == weights for entry in manifest.tensors.values())
    source = {
        name: tensor.view(torch.int16).numpy().view(format.dtype)
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    layer = "model.layers.1."
    down = stored(tmp_path / "b", manifest, "layers.1.mlp.down", format)
    np.testing.assert_array_equal(down, source[layer + "mlp.down_proj.weight"])
    qkv = stored(tmp_path / "b", manifest, "layers.1.attention.qkv", format)
    parts = [source[layer + f"self_attn.{part}_proj.weight"] for part in "qkv"]
    np.testing.assert_array_equal(qkv, np.concatenate(parts))
    pairs = stored(tmp_path / "b", manifest, "layers.1.mlp.gate_up", format).reshape(-1, 2, 16, 64)
    for which, part in enumerate(("gate", "up")):
        expected = source[layer + f"mlp.{part}_proj.weight"]
        np.testing.assert_array_equal(pairs[:, which].reshape(-1, 64), expected)


@pytest.mark.parametrize(
    ("dtype", "weights", "exact"),
    [
        ("float32", "fp32", {"fp32"}),
        ("bfloat16", "fp32", {"fp32"}),
        ("float32", "bf16", set()),
        ("float16", "bf16", set()),
        ("bfloat16", "fp16", set()),
        ("bfloat16", "fp8", {"bf16"}),  # the table and the head
        ("float16", "fp8", {"fp16"}),
        ("float32", "fp8", set()),
    ],
)
def test_what_is_exact_is_said(
    dtype: str, weights: str, exact: set[str], make_llama: MakeCheckpoint, tmp_path: Path
) -> None:
    manifest = export(make_llama(dtype=dtype), tmp_path / "b", uncertified(weights=weights))
    assert {entry.type for entry in manifest.tensors.values() if entry.exact} == exact
    tables = {manifest.tensors[module].type for module in ("embedding", "head")}
    assert tables == {manifest.quantization.embedding or weights}
    assert manifest.tensors["layers.0.mlp.down"].type == weights == manifest.quantization.weights


def test_the_group_size_is_the_types_own_or_as_asked(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    checkpoint = make_llama()
    for weights, group_size, expected in (
        ("fp8", None, 0),
        ("fp8", 32, 32),
        ("int8", None, 32),
        ("int8", 32, 32),
    ):
        options = uncertified(weights=weights, group_size=group_size, force=True)
        manifest = export(checkpoint, tmp_path / "b", options)
        assert (
            manifest.tensors["layers.0.mlp.down"].group_size == expected == manifest.quantization.group_size
        )


def test_a_weight_beyond_f16_is_named(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    checkpoint = make_llama(seed=11)
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e5
    save_file(weights, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: weight goes up to 100000, beyond f16"):
        export(checkpoint, tmp_path / "b", uncertified(weights="fp16"))
    for kind in ("bf16", "fp8"):
        export(checkpoint, tmp_path / kind, uncertified(weights=kind))


@pytest.mark.parametrize("weights", ["fp16", "bf16", "fp32"])
def test_a_group_size_without_groups_is_an_error(weights: str) -> None:
    with pytest.raises(
        InputError, match=f"belongs to int4, int8, fp8 weights, not to {weights}: leave it out"
    ):
        ExportOptions(weights=weights, group_size=32)


def test_the_command_offers_what_the_exporter_serves() -> None:
    assert command.WEIGHTS == exporter_options.WEIGHTS
    assert command.QUANTIZERS == exporter_options.QUANTIZERS
    assert ExportOptions().calibration_tokens == command.CALIBRATION_TOKENS


def test_fp8_blocks_share_their_scales(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    """Each 128 × 128 block of each weight has the scale max |w| / 448, cut short at the weight's last row."""
    from pagelet.exporter.checkpoint import open_checkpoint
    from pagelet.exporter.modules import layer_units
    from pagelet.exporter.stacked_rows import Treatment
    from pagelet.exporter.weights import stacked

    source = make_llama(hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2)
    format = FloatFormat("fp8", 128)
    with open_checkpoint(source) as checkpoint:
        for module, roles in layer_units(checkpoint.spec, 0):
            rows = stacked(checkpoint, module, roles, format, Treatment(fp8_blocks=True))
            packed = np.concatenate(list(rows.pieces()))
            codes, scales = float_packing.unpack(packed, rows.width, rows.count, format)
            plain = stacked(checkpoint, module, roles, format).floats(0, rows.count)
            for role in roles:
                weight = checkpoint.read(role + ".weight")
                where = [int(np.flatnonzero((plain == row).all(axis=1))[0]) for row in weight]
                for low in range(0, len(weight), 128):
                    for group in range(rows.width // 128):
                        block = weight[low : low + 128, 128 * group : 128 * (group + 1)]
                        expected = np.abs(block).max() / np.float32(448)
                        assert (scales[where[low : low + 128], group] == expected).all()
            restored = float_packing.dequantize(codes, scales, format)
            # E4M3 has three bits of mantissa: 1/16 of a value, and 2^-10 of the scale below 2^-6.
            assert (np.abs(restored - plain) <= np.abs(plain) / 16 + np.repeat(scales, 128, 1) / 1024).all()
