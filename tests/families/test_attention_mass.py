"""What GPTQ weighs tokens by is transformers' attention in families whose attention is not Llama's."""

from typing import Any

import numpy as np
import pytest
import torch
from families.conftest import MakeFamily
from families.rows import ROWS
from transformers import AutoModelForCausalLM

from pagelet.exporter.calibration.attention_mass import attention_mass
from pagelet.exporter.calibration.moments import small_weights
from pagelet.exporter.checkpoint import open_checkpoint


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize(
    "name", ["qwen3", "gemma2", "gemma3", "gpt_oss", "olmo2", "hunyuan", "cohere2", "smollm3"]
)
def test_mass_is_that_of_transformers(name: str, layer: int, make_family: MakeFamily) -> None:
    folder, _ = make_family(ROWS[name])
    options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
    if name == "gpt_oss":  # torch's grouped products do not know float64
        options["experts_implementation"] = "eager"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    attention, rows = model.model.layers[layer].self_attn, {}
    for part in "qkv":
        getattr(attention, part + "_proj").register_forward_hook(
            lambda module, args, output, part=part: rows.update({part: output[0].numpy()})
        )
    ids = np.random.default_rng(0).integers(2, 258, 50)
    with torch.no_grad():
        shares = model(torch.from_numpy(ids)[None], output_attentions=True).attentions[layer][0].numpy()
    expected = np.square(shares).sum(axis=(0, 1))
    qkv = np.concatenate([rows[part] for part in "qkv"], axis=1).astype(np.float32)
    with open_checkpoint(folder) as checkpoint:
        weights = small_weights(checkpoint, checkpoint.spec, layer)
        found = attention_mass(checkpoint.spec, layer, qkv, [len(ids)], weights)
    # Scores of float32 that reach 30: a probability is off by some 1e-5 of itself, its square by twice that.
    np.testing.assert_allclose(found, expected / expected.mean(), rtol=1e-4, atol=1e-6)
