"""Tiny random Llamas with every option, exported in fp32: logits and greedy tokens are transformers'."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import uncertified
from transformers import AutoModelForCausalLM

from pagelet.exporter import export
from pagelet.runtime import Engine, EngineConfig, SamplingParams

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True, "attention_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "no gqa": {"num_key_value_heads": 4},
    "odd heads": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
    "wide heads": {"head_dim": 32},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "large theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "epsilon": {"rms_norm_eps": 1e-2},
    "one layer": {"num_hidden_layers": 1},
    "bf16": {"dtype": "bfloat16"},
    "f16": {"dtype": "float16"},
}
# A few hundred float32 products summed in another order; a wrong weight, norm or angle is off by 0.1 and up.
TOLERANCE = 2e-3


def reference_logits(checkpoint: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_equals_transformers(variant: str, make_llama: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = make_llama(**VARIANTS[variant])
    export(checkpoint, tmp_path / "bundle", uncertified(weights="fp32", cache_type="f32"))
    ids = np.random.default_rng(1).integers(2, 258, 200).tolist()
    expected = reference_logits(checkpoint, ids)
    with Engine.open(tmp_path / "bundle", EngineConfig(kv_memory="16MiB")) as engine:
        assert np.abs(engine.logits(ids) - expected).max() <= TOLERANCE
        # Token by token through the paged cache, against the whole text at once.
        greedy = engine.generate(ids[:60], SamplingParams(max_tokens=40, ignore_eos=True)).token_ids
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    generated = model.generate(torch.tensor([ids[:60]]), max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert list(greedy) == generated[0, 60:].tolist()


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True, "attention_bias": True}])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_equals_transformers_with_the_dequantized_weights(
    options: dict[str, Any], group_size: int, symmetric: bool, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """The int4 graph is the fp32 graph with rounded weights; what stays is the rounding of activations."""
    from pagelet.exporter.quantize.rounding import round_to_nearest
    from pagelet.plugins.packing import LinearFormat, dequantize, quantize_rtn

    checkpoint = make_llama(hidden_size=128, intermediate_size=192, initializer_range=0.08, **options)
    export(checkpoint, tmp_path / "b", uncertified(group_size=group_size, symmetric=symmetric))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    layers, tables = LinearFormat(4, group_size, not symmetric), LinearFormat(8, 32, asymmetric=False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            is_table = "embed_tokens" in name or "lm_head" in name
            format, quantize = (tables, quantize_rtn) if is_table else (layers, round_to_nearest)
            rounded = dequantize(*quantize(parameter.detach().numpy(), format), format)
            parameter.data = torch.from_numpy(rounded)
    ids = np.random.default_rng(1).integers(2, 258, 100).tolist()
    with torch.no_grad():
        expected = np.asarray(model(torch.tensor([ids])).logits[0])
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="16MiB")) as engine:
        found = engine.logits(ids)
    # INT8 activations carry an error of about 1/254 of each group's largest value, that is some percent of
    # the logits' spread after a few layers; misplaced codes, scales or minimums give errors near 100%.
    assert np.abs(found - expected).mean() <= 0.03 * expected.std()
