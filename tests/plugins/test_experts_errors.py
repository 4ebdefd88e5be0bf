"""What is wrong with a node of Experts is said by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mixtures import FORMATS, mixture, random_rows, routed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routing": "sigmoid"}, "routing is 'sigmoid', expected softmax_topk or topk_softmax"),
        ({"num_experts": 0}, "num_experts is 0, expected 1 to 1024"),
        ({"top_k": 7}, "top_k is 7, expected 1 to 6"),
        ({"top_k": 0}, "top_k is 0, expected 1 to 6"),
        ({"normalize": 2}, "normalize is 2, expected 0 to 1"),
        ({"intermediate": 8}, "down_group_size is 32 for 8 inputs"),
        ({"intermediate": 2**24}, "intermediate is 16777216, expected 1 to 8388608"),
        ({"gate_up_weight_type": "int5"}, "attribute gate_up_weight_type is 'int5', expected one of int4"),
        ({"down_weight_type": "int8"}, "attribute down_asymmetric is 1, which only int4 weights can be"),
        ({"gate_up_group_size": 96}, "gate_up_group_size is 96 for 256 inputs"),
        ({"activation": "swish"}, "activation is 'swish', expected one of none, silu"),
        ({"epsilon": 2.0}, "epsilon is 2, expected 0 to 1"),
    ],
)
def test_wrong_attributes_are_errors(change: dict[str, Any], message: str) -> None:
    layer = mixture(FORMATS[0])
    with pytest.raises(Exception, match=message):
        layer.run(*random_rows(1, layer.features, layer.experts), **change)


def test_half_a_tile_is_an_error() -> None:
    with pytest.raises(Exception, match="intermediate is 8, expected a multiple of 16, whole tiles"):
        routed(np.zeros((1, 4)), top_k=1, routing="softmax_topk", intermediate=8)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("input", (3, 255), r"input has shape \[3, 255\], expected \[any, 256\]"),
        ("router_logits", (2, 6), r"router_logits has shape \[2, 6\], expected \[3, 6\]"),
        ("gate_up_bias", (6, 255), r"gate_up_bias has shape \[6, 255\], expected \[6, 256\]"),
        ("down_bias", (5, 256), r"down_bias has shape \[5, 256\], expected \[6, 256\]"),
        ("norm_weight", (255,), r"norm_weight has shape \[255\], expected \[256\]"),
        ("residual", (2, 256), r"residual has shape \[2, 256\], expected \[3, 256\]"),
    ],
)
def test_wrong_shapes_are_errors(name: str, shape: tuple[int, ...], message: str) -> None:
    layer = mixture(FORMATS[0])
    x, logits = random_rows(3, layer.features, layer.experts)
    with pytest.raises(Exception, match=message):
        layer.run(x, logits, {name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_weight_of_the_wrong_size_is_an_error(name: str) -> None:
    layer = mixture(FORMATS[0])
    weight = layer.constants[name]
    x, logits = random_rows(3, layer.features, layer.experts)
    with pytest.raises(
        Exception, match=rf"{name} has shape \[{len(weight) - 1}\], expected \[{len(weight)}\]"
    ):
        layer.run(x, logits, {name: weight[:-1]})
