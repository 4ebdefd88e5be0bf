"""GGUF files that llama.cpp's own converter wrote have transformers' logits; skipped where there is none."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import uncertified
from families.conftest import write_family
from families.gguf_rows import GGUF_ROWS, OLDER_CONFIG
from families.test_logits import TOLERANCE, reference
from families.written_gguf import write_merging_tokenizer
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from vocabularies import LLAMA_CPP, fetched

from pagelet.exporter import export
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.runtime import Engine, EngineConfig

pytestmark = pytest.mark.slow  # a minute to make and convert them all
Converted = tuple[Path, Any]


def need_llama_cpp() -> Path:
    """The folder of llama.cpp's sources with the converter."""
    return fetched(f"{LLAMA_CPP}/convert_hf_to_gguf.py").parent


def convert(paths: list[Path]) -> None:
    """Each folder into the file behind it."""
    driver = Path(__file__).with_name("convert_gguf.py")
    command = [sys.executable, driver, need_llama_cpp(), *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Converted]:
    """Every row's GGUF file and transformers' logits, by its name; converted in one go."""
    need_llama_cpp()
    folder = tmp_path_factory.mktemp("converted")
    rows, paths = {}, []
    for number, (name, row) in enumerate(GGUF_ROWS.items()):
        source, file = folder / str(number), folder / f"{number}.gguf"
        model = write_family(row, source)
        write_merging_tokenizer(source)
        path = source / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | OLDER_CONFIG.get(row.kind, {})))
        rows[name] = file, reference(model, ids(name))
        paths += [source, file]
    convert(paths)
    return rows


def ids(name: str) -> list[int]:
    return np.random.default_rng(1).integers(2, 258, (GGUF_ROWS[name].max_context or 200) - 4).tolist()


@pytest.mark.parametrize("name", GGUF_ROWS)
def test_a_converted_file_equals_transformers(
    name: str, converted: dict[str, Converted], tmp_path: Path
) -> None:
    file, expected = converted[name]
    options = uncertified(weights="fp32", cache_type="f32", max_context=GGUF_ROWS[name].max_context)
    export(file, tmp_path / "bundle", options)
    with Engine.open(tmp_path / "bundle", EngineConfig(kv_memory="16MiB")) as engine:
        assert np.abs(engine.logits(ids(name)) - expected).max() <= TOLERANCE


def test_gpt_oss_keeps_the_codes_of_its_experts(tmp_path: Path) -> None:
    need_llama_cpp()
    folder, file = tmp_path / "folder", tmp_path / "model.gguf"
    write_family(GGUF_ROWS["gpt_oss"], folder)
    write_merging_tokenizer(folder)
    experts = pack_experts(folder)
    convert([folder, file])
    with open_checkpoint(file) as checkpoint:
        at = "layers.1.mlp.experts.3."
        assert checkpoint.weights[at + "up.weight"].dtype == "MXFP4"
        gate_up = experts["model.layers.1.mlp.experts.gate_up_proj"][3]
        np.testing.assert_array_equal(checkpoint.read(at + "gate.weight"), gate_up[:, ::2].T)
        np.testing.assert_array_equal(checkpoint.read(at + "up.weight", 7, 30), gate_up[:, 1::2].T[7:30])
        down = experts["model.layers.1.mlp.experts.down_proj"][3]
        np.testing.assert_array_equal(checkpoint.read(at + "down.weight"), down.T)


def pack_experts(folder: Path) -> dict[str, Any]:
    """Random codes in the place of the experts' weights, as GPT-OSS is published; transformers' values."""
    rng, experts = np.random.default_rng(3), {}
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 130, blocks.shape[:3], np.uint8)
        tensors |= {name + "_blocks": blocks, name + "_scales": scales}
        both = torch.from_numpy(blocks), torch.from_numpy(scales)
        experts[name] = convert_moe_packed_tensors(*both, dtype=torch.float32).numpy()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | packed))
    return experts
