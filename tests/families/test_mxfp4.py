"""GPT-OSS as it is published: its experts in MXFP4."""

import json
from pathlib import Path

import numpy as np
import torch
from exporting import uncertified
from families.conftest import MakeFamily
from families.rows import ROWS
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagelet.exporter import export
from pagelet.exporter.checkpoint import open_checkpoint


def test_experts_are_what_transformers_makes_of_them(make_family: MakeFamily, tmp_path: Path) -> None:
    folder, _ = make_family(ROWS["gpt_oss"])
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    expected = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.from_numpy(rng.integers(0, 256, (*shape, 16), dtype=np.uint8))
        scales = torch.from_numpy(rng.integers(120, 126, shape, dtype=np.uint8))
        tensors |= {name + "_blocks": blocks, name + "_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    with open_checkpoint(folder) as checkpoint:
        for layer in range(checkpoint.spec.num_layers):
            at = f"model.layers.{layer}.mlp.experts."
            for expert in range(8):
                role, gate_up = f"layers.{layer}.mlp.experts.{expert}.", expected[at + "gate_up_proj"][expert]
                for part, weight in (
                    ("gate", gate_up[:, ::2]),
                    ("up", gate_up[:, 1::2]),
                    ("down", expected[at + "down_proj"][expert]),
                ):
                    found = checkpoint.read(f"{role}{part}.weight", 3, 40)
                    np.testing.assert_array_equal(found, weight.T[3:40].numpy())
    export(folder, tmp_path / "bundle", uncertified(weights="int8", cache_type="f32"))
