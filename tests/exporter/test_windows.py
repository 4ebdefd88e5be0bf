"""Layers that look back only so far: Mistral, and windows mixed with full attention, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import uncertified
from transformers import MinistralConfig, MinistralForCausalLM, MistralConfig, MistralForCausalLM

from pagelet.exporter import export
from pagelet.models.errors import PageletError
from pagelet.models.manifest import load_manifest
from pagelet.runtime import Engine, EngineConfig, SamplingParams

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "sliding_window": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def write(folder: Path, mixed: bool) -> Any:
    """A random checkpoint; the oracle's model."""
    torch.manual_seed(3)
    if mixed:
        model: Any = MinistralForCausalLM(MinistralConfig(**SMALL, head_dim=16, layer_types=MIXED))
    else:
        model = MistralForCausalLM(MistralConfig(**SMALL))
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("block_size", [8, 32])
def test_logits_and_greedy_tokens_equal_transformers(
    mixed: bool, block_size: int, tmp_path: Path, byte_tokenizer: Callable[[Path], None]
) -> None:
    model = write(tmp_path / "checkpoint", mixed)
    byte_tokenizer(tmp_path / "checkpoint")
    export(
        tmp_path / "checkpoint",
        tmp_path / "b",
        uncertified(weights="fp32", cache_type="f32", block_size=block_size),
    )
    assert load_manifest(tmp_path / "b").spec.window_groups == ((0, 40) if mixed else (40,))
    ids = np.random.default_rng(1).integers(2, 258, 200).tolist()
    with torch.no_grad():
        expected = np.asarray(model(torch.tensor([ids])).logits[0])
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="16MiB", max_step_tokens=48)) as engine:
        # As in test_llama: float32 sums in another order.
        assert np.abs(engine.logits(ids) - expected).max() <= 2e-3
        greedy = engine.generate(ids[:90], SamplingParams(max_tokens=60, ignore_eos=True)).token_ids
        assert engine.stats().blocks_used == 0
    model.generation_config.eos_token_id = None
    generated = model.generate(torch.tensor([ids[:90]]), max_new_tokens=60, do_sample=False, pad_token_id=0)
    assert list(greedy) == generated[0, 90:].tolist()


def test_an_unknown_layer_type_is_named(tmp_path: Path) -> None:
    from pagelet.models.config import spec_from_config

    config = MinistralConfig(**SMALL, head_dim=16, layer_types=MIXED).to_dict()
    config.update(architectures=["MinistralForCausalLM"], layer_types=["chunked_attention"] * 4)
    with pytest.raises(PageletError, match="'chunked_attention'"):
        spec_from_config(config)
