"""The export as a whole: what the bundle says of itself, wrong input, interruption, memory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exporting import uncertified

from pagelet.exporter import ExportOptions, export
from pagelet.models.errors import CheckpointError, InputError
from pagelet.models.manifest import check_files, load_manifest
from pagelet.tools.made_up import SHAPES, write_checkpoint

MakeCheckpoint = Callable[..., Path]


def test_the_manifest_describes_the_bundle(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    checkpoint = make_llama(attention_bias=True)
    exported = export(checkpoint, tmp_path / "b", uncertified(group_size=32, symmetric=True, max_context=100))
    manifest = load_manifest(tmp_path / "b")
    assert manifest == exported
    check_files(tmp_path / "b", manifest, weights=True)
    assert manifest.spec.max_context == 100
    assert manifest.quantization.weights == "int4"
    assert manifest.tensors["layers.0.attention.qkv"].symmetric
    assert manifest.tensors["layers.1.mlp.gate_up"].shape == (192, 64)
    assert manifest.tensors["embedding"].type == "int8"
    assert manifest.text.eos_token_ids == (1,)
    assert str(checkpoint.parent) not in json.dumps(manifest.to_json()), "a path of the exporting machine"
    assert {p.name for p in (tmp_path / "b").iterdir()} == {*manifest.files, "manifest.json"}


def test_two_exports_are_equal(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    checkpoint = make_llama()
    first, second = (export(checkpoint, tmp_path / name, uncertified()) for name in "ab")
    assert first == second


def test_gguf_blocks_pass_through_unchanged(smollm2_gguf: Path, smollm2_int4: Path) -> None:
    """Q4_1 and Q8_0 tensors: what the bundle's weights stand for is bitwise what the file's stand for."""
    import gguf

    from pagelet.plugins.packing import LinearFormat, dequantize, unpack

    manifest = load_manifest(smollm2_int4)
    assert all(entry.exact for entry in manifest.tensors.values())
    reader = gguf.GGUFReader(smollm2_gguf)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    stored = (smollm2_int4 / "model.weights").read_bytes()

    def found(module: str, format: LinearFormat) -> np.ndarray:
        graph = (smollm2_int4 / "model.onnx").read_bytes()
        offset = external_offset(graph, module + ".weight")
        rows, columns = manifest.tensors[module].shape
        packed = np.frombuffer(stored, np.uint8, format.packed_bytes(columns, rows), offset)
        return dequantize(*unpack(packed, columns, rows, format), format)

    down = tensors["blk.7.ffn_down.weight"]
    expected = gguf.quants.dequantize(down.data, down.tensor_type)
    assert np.array_equal(found("layers.7.mlp.down", LinearFormat()), expected)
    table = tensors["token_embd.weight"]
    expected = gguf.quants.dequantize(table.data, table.tensor_type)
    assert np.array_equal(found("embedding", LinearFormat(8, 32, asymmetric=False)), expected)


def external_offset(graph: bytes, name: str) -> int:
    import onnx

    for tensor in onnx.load_model_from_string(graph).graph.initializer:
        if tensor.name == name:
            return int(next(entry.value for entry in tensor.external_data if entry.key == "offset"))
    raise AssertionError(name)


def test_a_tied_table_is_stored_once(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    sizes = {}
    for tied in (False, True):
        export(make_llama(tie_word_embeddings=tied), tmp_path / str(tied), uncertified(weights="fp32"))
        sizes[tied] = (tmp_path / str(tied) / "model.weights").stat().st_size
    assert sizes[False] - sizes[True] == 320 * 64 * 4


def test_a_damaged_weight_is_named(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    checkpoint = make_llama(seed=11)
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(weights, checkpoint / "model.safetensors")
    for kind in ("int4", "fp32"):
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
            export(checkpoint, tmp_path / "b", uncertified(weights=kind))
    assert list(tmp_path.iterdir()) == []


def test_inputs_that_do_not_divide_into_groups(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    checkpoint = make_llama(hidden_size=80, num_attention_heads=5, num_key_value_heads=5)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight: 80 inputs do not divide into groups of 32"
    ):
        export(checkpoint, tmp_path / "b", uncertified())
    assert list(tmp_path.iterdir()) == []
    export(checkpoint, tmp_path / "b", uncertified(weights="fp32"))


def test_more_context_than_the_model_has(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1000 is more than the model's own 512"):
        export(make_llama(), tmp_path / "b", uncertified(max_context=1000))


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": "int3"},
        {"group_size": 48},
        {"target": "toaster"},
        {"max_context": 0},
        {"block_size": 0},
        {"embedding": "int2"},
    ],
)
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        ExportOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_export_interrupted_in_its_first_layer_leaves_nothing(
    kind: signal.Signals, tmp_path: Path
) -> None:
    """Once a layer is written the next export goes on behind it: test_resume."""
    write_checkpoint(tmp_path / "checkpoint", {**SHAPES["100m"], "num_hidden_layers": 4})
    command = [
        sys.executable,
        "-c",
        "import sys; from pagelet.tools.cli import main; sys.exit(main())",
        "export",
    ]
    child = subprocess.Popen(
        [*command, str(tmp_path / "checkpoint"), str(tmp_path / "b")], stderr=subprocess.PIPE, text=True
    )
    partial = tmp_path / f".b.partial-{child.pid}" / "model.weights"
    while child.poll() is None and not (partial.exists() and partial.stat().st_size):
        time.sleep(0.005)
    os.kill(child.pid, kind)
    _, said = child.communicate()
    assert child.returncode == 130
    assert said.endswith("pagelet: stopped\n")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def peak_of_an_export(folder: Path, num_layers: int, weights: str) -> int:
    """Bytes, of a process of its own."""
    code = (
        "import sys; from pathlib import Path; from pagelet.exporter import ExportOptions, export\n"
        "from pagelet.tools.memory import peak_rss\n"
        "options = ExportOptions(weights=sys.argv[3], certificate_seconds=None)\n"
        "export(Path(sys.argv[1]), Path(sys.argv[2]), options); print(peak_rss())"
    )
    checkpoint, out = folder / f"c{num_layers}", folder / f"{weights}-{num_layers}"
    write_checkpoint(checkpoint, {**SHAPES["100m"], "num_hidden_layers": num_layers})
    command = [sys.executable, "-c", code, str(checkpoint), str(out), weights]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.findall(r"\d+", done.stdout)[-1])


def test_memory_does_not_depend_on_the_number_of_layers(tmp_path: Path) -> None:
    few, many = (peak_of_an_export(tmp_path, num_layers, "int8") for num_layers in (2, 12))
    # 10 layers more are 141 MB in bf16 and 283 MB in f32; what may grow is the graph, a few kilobytes.
    assert many - few < 30 << 20


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_memory_is_near_one_tensors(weights: str, tmp_path: Path) -> None:
    """Within three of the largest tensor in f32 plus 300 MB."""
    assert peak_of_an_export(tmp_path, 1, weights) < 3 * 4 * 32_000 * 768 + (300 << 20)
