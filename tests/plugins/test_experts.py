"""Experts against NumPy and against nodes of Linear, and a row's bits whatever else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_node import run_node, run_tests_on

from pagelet.plugins import float_packing, native, packing
from pagelet.plugins.activations import Activation
from pagelet.plugins.float_packing import FloatFormat, float_linear_reference
from pagelet.plugins.packing import LinearFormat, linear_reference, rms_norm_reference
from pagelet.plugins.reference_experts import MAX_EXPERTS, ROUTINGS, experts_reference, routing_weights

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Format = LinearFormat | FloatFormat

INPUTS = (
    "input",
    "router_logits",
    "gate_up",
    "down",
    "gate_up_bias",
    "down_bias",
    "norm_weight",
    "residual",
)
LINEAR_INPUTS = ("x", "weight", "bias", "norm_weight", "residual")
FUSED = native.selected_isa() != "portable"
FORMATS: list[tuple[Format, Format]] = [
    (LinearFormat(4, 32, True), LinearFormat(4, 32, True)),
    (LinearFormat(4, 64, False), LinearFormat(8, 32, False)),
    (LinearFormat(8, 128, False), LinearFormat(4, 64, True)),
    (FloatFormat("fp8"), FloatFormat("fp8", 32)),
    (FloatFormat("bf16"), FloatFormat("f16")),
    (FloatFormat("f32"), LinearFormat(4, 32, True)),
    (LinearFormat(4, 32, True), FloatFormat("f32")),
]


@dataclass(frozen=True)
class Weight:
    """One linear layer [N, K] as stored, and its reference."""

    format: Format
    parts: Any
    bias: Float32

    def __call__(self, x: Float32) -> Float32:
        if isinstance(self.format, LinearFormat):
            return linear_reference(x, *self.parts, self.format, self.bias, FUSED)
        return float_linear_reference(x, *self.parts, self.format, self.bias, FUSED)

    def packed(self, gated: bool) -> Array:
        """Of a gated layer, gate and the other half alternate in tiles of 16."""
        parts = [interleaved(part) if gated and part is not None else part for part in self.parts]
        if isinstance(self.format, LinearFormat):
            return packing.pack(*parts, self.format)
        return float_packing.pack(*parts, self.format)


def interleaved(rows: Array) -> Array:
    pairs = rows.reshape(2, -1, 16, rows.shape[1]).swapaxes(0, 1)
    return np.ascontiguousarray(pairs).reshape(rows.shape)


def random_weight(rng: np.random.Generator, format: Format, out_features: int, in_features: int) -> Weight:
    weight = rng.normal(0, in_features**-0.5, (out_features, in_features)).astype(np.float32)
    parts: Any = (
        packing.quantize_rtn(weight, format)
        if isinstance(format, LinearFormat)
        else float_packing.quantize(weight, format)
    )
    return Weight(format, parts, rng.normal(0, 0.3, out_features).astype(np.float32))


def format_attributes(format: Format) -> dict[str, Any]:
    asymmetric = isinstance(format, LinearFormat) and format.asymmetric
    return {
        "weight_type": format.weight_type,
        "group_size": format.group_size,
        "asymmetric": int(asymmetric),
    }


class Mixture:
    """Random experts, and the op's answer over them."""

    def __init__(
        self, formats: tuple[Format, Format], experts: int, features: int, intermediate: int
    ) -> None:
        rng = np.random.default_rng(experts)
        self.formats, self.experts = formats, experts
        self.features, self.intermediate = features, intermediate
        self.gate_up = [random_weight(rng, formats[0], 2 * intermediate, features) for _ in range(experts)]
        self.down = [random_weight(rng, formats[1], features, intermediate) for _ in range(experts)]
        self.norm = rng.normal(1, 0.3, features).astype(np.float32)
        self.constants = {
            "gate_up": np.concatenate([weight.packed(True) for weight in self.gate_up]),
            "down": np.concatenate([weight.packed(False) for weight in self.down]),
            "gate_up_bias": np.stack([weight.bias for weight in self.gate_up]),
            "down_bias": np.stack([weight.bias for weight in self.down]),
        }

    def attributes(self, **more: Any) -> dict[str, Any]:
        return {
            "num_experts": self.experts,
            "top_k": min(2, self.experts),
            "routing": "topk_softmax",
            "in_features": self.features,
            "intermediate": self.intermediate,
            **{f"gate_up_{name}": value for name, value in format_attributes(self.formats[0]).items()},
            **{f"down_{name}": value for name, value in format_attributes(self.formats[1]).items()},
            **more,
        }

    def run(self, x: Array, logits: Array, inputs: Any = None, threads: int = 1, **more: Any) -> Float32:
        given = {"input": x, "router_logits": logits, **self.constants, **(inputs or {})}
        return run_node("Experts", INPUTS, self.attributes(**more), given, threads)

    def expert(self, index: int, x: Float32) -> Float32:
        """The same expert by two nodes of Linear."""
        hidden = x
        for format, weight, gated in (
            (self.formats[0], self.gate_up[index], True),
            (self.formats[1], self.down[index], False),
        ):
            attributes = {
                "in_features": hidden.shape[1],
                "out_features": len(weight.bias),
                "gated": int(gated),
                **format_attributes(format),
            }
            inputs = {"x": hidden, "weight": weight.packed(gated), "bias": weight.bias}
            hidden = run_node("Linear", LINEAR_INPUTS, attributes, inputs)
        return hidden


@lru_cache(maxsize=4)
def mixture(
    formats: tuple[Format, Format], experts: int = 6, features: int = 256, intermediate: int = 128
) -> Mixture:
    return Mixture(formats, experts, features, intermediate)


def random_rows(rows: int, features: int, experts: int, seed: int = 0) -> tuple[Float32, Float32]:
    """Rows of different magnitude, and logits."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)) * 10.0 ** rng.integers(-1, 2, (rows, 1))
    return x.astype(np.float32), rng.normal(0, 2, (rows, experts)).astype(np.float32)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_the_op_is_the_reference(formats: tuple[Format, Format]) -> None:
    layer = mixture(formats)
    x, logits = random_rows(23, layer.features, layer.experts)
    residual = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    for top_k, routing, normalize, activation in (
        (1, "softmax_topk", False, Activation("silu")),
        (2, "softmax_topk", True, Activation("gelu_tanh")),
        (4, "topk_softmax", False, Activation("swiglu_oai", (7.0,))),
    ):
        inputs = {"norm_weight": layer.norm, "residual": residual}
        attributes = {"top_k": top_k, "routing": routing, "normalize": int(normalize), "output_scale": 0.25}
        y = layer.run(x, logits, inputs, **attributes, **activation.attributes())
        weights = routing_weights(logits, top_k, routing, normalize)
        normed = rms_norm_reference(x, layer.norm, 1e-5, FUSED)
        expected = experts_reference(normed, weights, layer.gate_up, layer.down, activation, 0.25, residual)
        error = np.abs(y - expected).max(axis=1) / np.abs(expected).max(axis=1)
        # A few roundings of float32. An activation at the edge between two codes of 8 bits may fall to either
        # side, and moves its row by a code of one of 128 inputs: less than 1/127, and seldom.
        quantized = isinstance(formats[1], LinearFormat)
        assert np.sort(error)[-3 if quantized else -1] < 2e-6
        assert error.max() < 1e-3


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_an_expert_is_two_nodes_of_linear_to_the_bit(formats: tuple[Format, Format]) -> None:
    layer = mixture(formats)
    x, logits = random_rows(70, layer.features, layer.experts)
    for top_k in (1, 2, 4):  # equal logits: weights are 1 / top_k, exactly
        chosen = routing_weights(logits, top_k, "topk_softmax") > 0
        y = layer.run(x, np.where(chosen, 3, -200).astype(np.float32), top_k=top_k, output_scale=1.5)
        expected = np.zeros_like(x)
        for expert in range(layer.experts):
            rows = chosen[:, expert]
            expected[rows] += np.float32(1 / top_k) * layer.expert(expert, x[rows])
        np.testing.assert_array_equal(y, np.float32(1.5) * expected)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_a_row_is_the_same_in_every_batch_and_on_every_number_of_threads(
    formats: tuple[Format, Format],
) -> None:
    layer = mixture(formats)
    x, logits = random_rows(600, layer.features, layer.experts, seed=3)
    inputs = {"norm_weight": layer.norm}
    whole = layer.run(x, logits, inputs, top_k=3)
    for rows in (0, 1, 2, 3, 9, 33, 512, 513):
        np.testing.assert_array_equal(layer.run(x[:rows], logits[:rows], inputs, 2, top_k=3), whole[:rows])
    for row in range(0, 600, 29):
        alone = layer.run(x[row : row + 1], logits[row : row + 1], inputs, top_k=3)
        np.testing.assert_array_equal(alone, whole[row : row + 1])
    order = np.random.default_rng(4).permutation(600)
    np.testing.assert_array_equal(layer.run(x[order], logits[order], inputs, 2, top_k=3), whole[order])


def routed(logits: Array, **attributes: Any) -> Float32:
    """The op's weights [T, E]: its experts answer with one-hot vectors, the bias of a weight of zeros."""
    experts, features, intermediate = logits.shape[1], logits.shape[1], 16
    attributes = {
        "num_experts": experts,
        "in_features": features,
        "intermediate": intermediate,
        "gate_up_weight_type": "f32",
        "down_weight_type": "f32",
        **attributes,
    }
    format = FloatFormat("f32")
    inputs = {
        "input": np.ones((len(logits), features), np.float32),
        "router_logits": logits.astype(np.float32),
        "gate_up": np.zeros(experts * format.packed_bytes(features, 2 * intermediate), np.uint8),
        "down": np.zeros(experts * format.packed_bytes(intermediate, features), np.uint8),
        "down_bias": np.eye(experts, features, dtype=np.float32),
    }
    return run_node("Experts", INPUTS, attributes, inputs)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 64).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts))),
    st.sampled_from(ROUTINGS),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_routing(sizes: tuple[int, int], routing: str, normalize: bool, seed: int) -> None:
    experts, top_k = sizes
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (5, experts))
    logits[rng.random(5) < 0.4] //= 2  # ties
    weights = routed(logits, top_k=top_k, routing=routing, normalize=int(normalize))
    expected = routing_weights(logits.astype(np.float32), top_k, routing, normalize)
    np.testing.assert_array_equal(weights > 0, expected > 0)
    # A difference of logits, e^x, a sum of 64 and a quotient: logits of 12 are rounded by 2^-21.
    np.testing.assert_allclose(weights, expected, rtol=5e-6)


def test_the_most_experts() -> None:
    logits = np.random.default_rng(0).normal(size=(2, MAX_EXPERTS))
    weights = routed(logits, top_k=MAX_EXPERTS, routing="softmax_topk")
    expected = routing_weights(logits.astype(np.float32), MAX_EXPERTS, "softmax_topk")
    np.testing.assert_allclose(weights, expected, rtol=1e-5)  # a sum of 1024, in order
    with pytest.raises(Exception, match=f"num_experts is {MAX_EXPERTS + 1}, expected 1 to {MAX_EXPERTS}"):
        routed(np.zeros((1, MAX_EXPERTS + 1)), top_k=1, routing="softmax_topk")


def test_of_equal_logits_the_first_are_taken() -> None:
    logits = np.array([[0, 1, 1, 1], [2, 2, 2, 2], [0.0, -0.0, 0.0, -0.0]])
    weights = routed(logits, top_k=2, routing="topk_softmax")
    np.testing.assert_array_equal(weights, [[0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_not_finite_logits_stay_in_their_row(routing: str) -> None:
    layer = mixture(FORMATS[0])
    x, logits = random_rows(9, layer.features, layer.experts)
    clean = layer.run(x, logits, routing=routing)
    dirty = logits.copy()
    dirty[1, np.argmin(logits[1])] = np.nan  # not among the chosen
    dirty[2] = np.nan
    dirty[4, 3] = np.inf
    dirty[5] = -np.inf
    y = layer.run(x, dirty, routing=routing)
    broken = np.isin(np.arange(9), (1, 2, 4, 5))
    assert np.isnan(y[broken]).all()
    np.testing.assert_array_equal(y[~broken], clean[~broken])
    ruled_out = logits.copy()
    ruled_out[:, 0] = -np.inf
    assert np.isfinite(layer.run(x, ruled_out, routing=routing)).all()


def test_not_finite_rows_stay_in_their_row() -> None:
    layer = mixture(FORMATS[0])
    x, logits = random_rows(9, layer.features, layer.experts)
    clean = layer.run(x, logits)
    dirty = x.copy()
    dirty[2, 7], dirty[6, 100] = np.nan, np.inf
    y = layer.run(dirty, logits)
    broken = np.isin(np.arange(9), (2, 6))
    assert np.isnan(y[broken]).all()
    np.testing.assert_array_equal(y[~broken], clean[~broken])


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


@pytest.mark.parametrize("isa", native.available_isas())
def test_on_every_instruction_set(isa: str) -> None:
    run_tests_on(isa, __file__)
