"""The language model inside a checkpoint that also sees, and names that leave the base model's out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from exporting import uncertified
from families.conftest import MakeFamily, shake
from families.rows import ROWS, Row, config_options
from families.test_logits import TOLERANCE
from safetensors.numpy import load_file, save_file

from pagelet.exporter import export
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.runtime import Engine, EngineConfig

_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 28, "patch_size": 14}  # fmt: skip
_TOWER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def gemma3(text: Any) -> Any:
    vision = transformers.SiglipVisionConfig(**_VISION)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")


def mistral3(text: Any) -> Any:
    vision = transformers.PixtralVisionConfig(**_VISION)
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    return transformers.Mistral3ForConditionalGeneration._from_config(config, attn_implementation="eager")


def gemma4(text: Any) -> Any:
    vision = transformers.Gemma4VisionConfig(**{key: _VISION[key] for key in _TOWER}, head_dim=16)
    audio = transformers.Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=audio)
    return transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("wrap", "row"),
    [
        (gemma4, ROWS["gemma4"]),
        (gemma3, ROWS["gemma3"]),
        (mistral3, Row("Mistral")),
        (mistral3, ROWS["ministral3"]),
    ],
)
def test_the_text_model_of_a_wrapper(
    wrap: Callable[[Any], Any], row: Row, tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    torch.manual_seed(0)
    text = config_options(row) | {"pad_token_id": 0}  # transformers' Gemma 4 puts it in place of images
    model = wrap(getattr(transformers, f"{row.kind}Config")(**text)).eval()
    for name, parameter in model.named_parameters():
        shake(name, parameter)
    model.save_pretrained(tmp_path / "checkpoint")
    byte_tokenizer(tmp_path / "checkpoint")
    notes: list[str] = []
    options = uncertified(weights="fp32", cache_type="f32")
    export(tmp_path / "checkpoint", tmp_path / "b", options, on_note=notes.append)
    assert any("only the language model is exported" in note for note in notes)
    ids = np.random.default_rng(1).integers(2, 258, 60).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="16MiB")) as engine:
        assert np.abs(engine.logits(ids) - expected).max() <= TOLERANCE


def test_gpt2_without_its_base_models_name(make_family: MakeFamily) -> None:
    folder, _ = make_family(ROWS["gpt2"])
    tensors = load_file(folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        expected = {role: checkpoint.read(role) for role in checkpoint.weights}
    bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        for role, array in expected.items():
            np.testing.assert_array_equal(checkpoint.read(role), array)
