"""The rotation's frequencies against transformers'."""

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.rope import RopeSpec
from pagelet.models.rope_config import rope_from_section, rope_section


def read(config: dict[str, Any], head_dim: int = 64, positions: int = 512) -> RopeSpec:
    return rope_from_section(rope_section(config), head_dim, positions)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_frequencies_equal_transformers(theta: float, scaling: dict[str, Any] | None) -> None:
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=parameters
    )
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    new_form = read({"rope_parameters": parameters})
    old_form = read({"rope_theta": theta, "rope_scaling": scaling})
    assert new_form == old_form
    # Both compute in float32; pow may differ in its last bit.
    np.testing.assert_allclose(new_form.inverse_frequencies(), expected, rtol=3e-7)


def test_old_configs_call_the_type_type() -> None:
    rope = read({"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (rope.scaling, rope.factor, rope.theta) == ("linear", 2.0, 10000.0)


def test_gguf_divisors() -> None:
    plain, divided = RopeSpec(10000.0, 4), RopeSpec(10000.0, 4, "factors", frequency_divisors=(1.0, 8.0))
    np.testing.assert_array_equal(
        divided.inverse_frequencies(), plain.inverse_frequencies() / np.float32([1, 8])
    )


def test_tables_hold_cos_and_sin_of_position_times_frequency() -> None:
    rope = RopeSpec(10000.0, 8)
    cos, sin = rope.tables(5)
    assert cos.shape == sin.shape == (5, 4)
    angles = np.arange(5)[:, None] * rope.inverse_frequencies().astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)  # a float32 angle up to 4 rad
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)


def test_tables_may_be_made_in_pieces() -> None:
    rope = RopeSpec(10000.0, 8)
    whole, tail = rope.tables(5), rope.tables(2, 3)
    for all_of_it, part in zip(whole, tail, strict=True):
        np.testing.assert_array_equal(all_of_it[3:], part)


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'spiral'"):
        read({"rope_scaling": {"rope_type": "spiral"}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": [1]}, "expected an object"),
        ({"rope_theta": "big"}, "'rope_theta' is 'big'"),
        ({"rope_theta": float("nan")}, "'rope_theta' is nan"),
        ({"rope_theta": -1.0}, "'rope_theta' is -1.0"),
        ({"rope_theta": 10**400}, "'rope_theta'"),
        ({"partial_rotary_factor": float("inf")}, "'partial_rotary_factor'"),
        ({"partial_rotary_factor": 2.0}, "'partial_rotary_factor'"),
        (
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": "x"}},
            "'original_max_position_emb",
        ),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, "no 'factor'"),
    ],
)
def test_values_that_make_no_sense_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config)
