"""What an adapter saves whole is read as the family stores it."""

import json
from pathlib import Path

import numpy as np
import pytest
from families.conftest import MakeFamily
from families.gguf_rows import GGUF_ROWS
from families.test_gguf_written import FILES
from families.written_gguf import write_gguf
from safetensors.numpy import load_file, save_file

from pagelet.exporter.checkpoint import open_checkpoint

NORMS = {
    "model.norm": "final_norm.weight",
    "model.layers.1.pre_feedforward_layernorm": "layers.1.mlp.norm.weight",
    "model.layers.2.self_attn.k_norm": "layers.2.attention.k_norm.weight",
}


@pytest.mark.parametrize(("name", "offset"), [("gemma3", 1.0), ("gemma4", 0.0)])
@pytest.mark.parametrize("of_gguf", [False, True])
def test_a_norm_that_is_replaced(
    name: str, offset: float, of_gguf: bool, make_family: MakeFamily, tmp_path: Path
) -> None:
    folder, model = make_family(GGUF_ROWS[name])
    base = folder
    if of_gguf:
        base = tmp_path / "model.gguf"
        file = next(file for file in FILES if file.row == name)
        write_gguf(base, file.arch, model, file.keys, file.extra)
    rng, tensors = np.random.default_rng(2), load_file(folder / "model.safetensors")
    own = {
        module: rng.standard_normal(tensors[module + ".weight"].shape).astype(np.float32) for module in NORMS
    }
    write_saved(tmp_path / "adapter", own)
    with open_checkpoint(base, tmp_path / "adapter") as merged, open_checkpoint(base) as plain:
        for module, role in NORMS.items():
            np.testing.assert_array_equal(merged.read(role), own[module] + np.float32(offset))
            np.testing.assert_array_equal(merged.read(role, 3, 7), own[module][3:7] + np.float32(offset))
        role = "layers.2.attention.q_norm.weight"
        np.testing.assert_array_equal(merged.read(role), plain.read(role))


def write_saved(folder: Path, modules: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> None:
    """An adapter of whole modules alone, as PEFT saves them."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    saved = {"modules_to_save": [module.rpartition(".")[2] for module in modules]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | saved))
    tensors = {f"base_model.model.{module}.weight": array for module, array in modules.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
