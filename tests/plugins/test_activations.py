"""What `Linear` does behind its products: activation functions, gates of any of them, and a factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_node import run_node, run_tests_on
from transformers.activations import ACT2FN, XIELUActivation

from pagelet.plugins import native
from pagelet.plugins.activations import PARAMETERS, Activation
from pagelet.plugins.float_packing import FloatFormat, pack

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

INPUTS = ("x", "weight", "bias", "norm_weight", "residual")
ALL = [
    Activation("none"),
    Activation("silu"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu"),
    Activation("relu2"),
    Activation("softcap", (30.0,)),
    Activation("softcap", (0.5,)),
    Activation("swiglu_oai", (7.0,)),
    # Powers of two, and so the same numbers in float32.
    Activation("xielu", (0.75, 0.25, 0.5, -(2.0**-20))),
]
OF_ONE = [activation for activation in ALL if activation.name != "swiglu_oai"]
# The worst error measured, over 900,000 numbers with and without fused multiply-adds, is 1.8e-7 of the larger
# of |x| and |y|: two or three roundings of 2^-24. silu of less than -88.3 is x e^-88.3.
TOLERANCE = 3e-7
# The worst error in units of y itself, where that is no less than 1e-30: an exponent e of the tail is rounded
# by up to e 2^-24. Measured: 1.8e-7, 4.0e-6, 1.2e-5, 5.9e-8, 2.6e-7. xielu crosses zero.
TAILS = {"silu": 3e-7, "gelu": 6e-6, "gelu_tanh": 2e-5, "relu2": 1e-7, "softcap": 4e-7}


def linear(
    weight: Array, x: Array, activation: Activation | None, /, inputs: Any = None, **more: Any
) -> Float32:
    """`Linear` over a plain float32 weight [N, K]."""
    format = FloatFormat("f32")
    attributes = {"out_features": weight.shape[0], "in_features": weight.shape[1], "weight_type": "f32"}
    attributes |= {} if activation is None else activation.attributes()
    packed = pack(weight.astype(np.float32), None, format)
    given = {"x": x.astype(np.float32), "weight": packed, **(inputs or {})}
    return run_node("Linear", INPUTS, attributes | more, given)


def of_one(activation: Activation, x: Array, columns: int = 1) -> Float32:
    """The op's function of x [T], in `columns` columns: a weight of ones takes x as it is."""
    return linear(np.ones((columns, 1)), x[:, None], activation)


def of_two(activation: Activation, gate: Array, up: Array) -> Float32:
    """The op's function of a gate and its other half, [T] each, in 16 columns."""
    weight = np.repeat([[1, 0], [0, 1]], 16, axis=0)
    return linear(weight, np.stack([gate, up], axis=1), activation, gated=1)


def numbers() -> Float32:
    """Of every magnitude, and finely where the functions bend."""
    magnitudes = 10.0 ** np.random.default_rng(0).uniform(-30, 30, 20_000)
    fine = [np.linspace(-20, 20, 40_001), np.linspace(-100, 100, 10_001)]
    return np.concatenate([magnitudes, -magnitudes, *fine]).astype(np.float32)


def test_the_op_has_the_same_functions_and_parameters() -> None:
    one = np.ones((1, 1))
    with pytest.raises(
        Exception, match=f"activation is 'tanh', expected one of {', '.join(PARAMETERS)}(?!,)"
    ):
        linear(one, one, None, activation="tanh")
    assert {activation.name for activation in ALL} == set(PARAMETERS)
    for activation in ALL:
        given = activation.attributes()
        count = len(PARAMETERS[activation.name])
        gated = {"gated": 1, "out_features": 32}
        for letter in "abcd"[:count]:
            less = {name: value for name, value in given.items() if name != f"activation_{letter}"}
            with pytest.raises(Exception, match=f"attribute activation_{letter} is nan, expected "):
                linear(np.ones((32, 1)), one, None, **less, **gated)
        for letter in "abcd"[count:]:
            with pytest.raises(
                Exception, match=f"activation_{letter} is given, but {activation.name} has {count} "
            ):
                linear(np.ones((32, 1)), one, activation, **{f"activation_{letter}": 1.0}, **gated)


@pytest.mark.parametrize("activation", OF_ONE, ids=str)
def test_a_function_of_one_number(activation: Activation) -> None:
    x = numbers()
    with np.errstate(over="ignore"):
        y, expected = of_one(activation, x)[:, 0].astype(np.float64), activation(x)
    fits = np.abs(expected) < 3e38
    x, y, expected = x[fits], y[fits], expected[fits]
    error = np.abs(y - expected)
    assert (error <= TOLERANCE * np.maximum(np.abs(x), np.abs(expected))).all()
    tail = np.abs(expected) > 1e-30
    if activation.name in TAILS:
        assert (error[tail] <= TAILS[activation.name] * np.abs(expected[tail])).all()


@pytest.mark.parametrize("activation", OF_ONE, ids=str)
def test_what_is_not_finite_or_is_very_large(activation: Activation) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0], np.float32)
    nan, high, low, large, small, zero = of_one(activation, x)[:, 0].tolist()
    assert np.isnan(nan)
    limits = {  # at infinity, at -infinity
        "gelu": (np.inf, 0.0),
        "gelu_tanh": (np.inf, pytest.approx(0.0, abs=1e-36)),
        "relu": (np.inf, 0.0),
        "relu2": (np.inf, 0.0),
        "softcap": (*activation.parameters, *(-cap for cap in activation.parameters)),
        "xielu": (np.inf, np.inf),
    }
    assert (high, low) == limits.get(activation.name, (np.inf, -np.inf))
    assert not np.isnan([large, small]).any()
    assert zero == pytest.approx(activation(0.0).item(), abs=1e-12)


@pytest.mark.parametrize("activation", ALL, ids=str)
def test_a_gated_layer(activation: Activation) -> None:
    rng = np.random.default_rng(1)
    gate, up = rng.normal(0, 8, (2, 20_000)).astype(np.float32)
    y, expected = of_two(activation, gate, up), activation.gate(gate, up)
    # A rounding more than of one number, in each product; swiglu_oai adds 1 to the other half.
    magnitude = np.maximum(np.abs(gate), np.abs(activation.gate(gate, np.ones_like(up)))) * (np.abs(up) + 1)
    assert (np.abs(y[:, 0] - expected) <= 2 * TOLERANCE * magnitude).all()
    assert (y == y[:, :1]).all()


def test_gpt_oss_gates_saturate_and_keep_nan() -> None:
    activation = Activation("swiglu_oai", (7.0,))
    large = np.array([1e30, -1e30, 1e30, -1e30, np.nan, 1.0], np.float32)
    other = np.array([1e30, 1e30, -1e30, -1e30, 1.0, np.nan], np.float32)
    y = of_two(activation, large, other)[:, 0]
    top = 7 / (1 + np.exp(-1.702 * 7))
    np.testing.assert_allclose(y[:4], [8 * top, 0, -6 * top, 0], rtol=TOLERANCE, atol=1e-33)
    assert np.isnan(y[4:]).all()


def test_without_the_attribute_a_gate_is_silu_and_a_plain_layer_stays() -> None:
    rng = np.random.default_rng(2)
    weight, x = rng.normal(size=(64, 40)), rng.normal(size=(9, 40))
    silu = linear(weight, x, Activation("silu"), gated=1)
    np.testing.assert_array_equal(linear(weight, x, None, gated=1), silu)
    np.testing.assert_array_equal(linear(weight, x, None), linear(weight, x, Activation("none")))


@pytest.mark.parametrize("activation", OF_ONE, ids=str)
def test_a_number_has_the_same_bits_wherever_it_stands(activation: Activation) -> None:
    x = numbers()[::7]
    alone = of_one(activation, x)
    for columns in (5, 16, 33, 100):  # parts of a tile, a tile, several strips of tiles
        np.testing.assert_array_equal(of_one(activation, x, columns), np.tile(alone, (1, columns)))
    np.testing.assert_array_equal(of_one(activation, x[::-1].copy()), alone[::-1])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(OF_ONE), st.floats(-1e6, 1e6, width=32), st.floats(-100, 100, width=32))
def test_a_factor_and_then_the_residual(activation: Activation, scale: float, value: float) -> None:
    x = np.array([value], np.float32)
    residual = np.array([[3.25]], np.float32)
    inputs = {"residual": residual}
    y = linear(np.ones((1, 1)), x[:, None], activation, inputs, output_scale=scale)
    np.testing.assert_array_equal(y, of_one(activation, x) * np.float32(scale) + residual)


TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ACT2FN["silu"],
    "gelu": ACT2FN["gelu"],
    "gelu_tanh": ACT2FN["gelu_pytorch_tanh"],
    "relu": ACT2FN["relu"],
    "relu2": ACT2FN["relu2"],
}


@pytest.mark.parametrize("name", TORCH)
def test_the_references_are_those_of_transformers(name: str) -> None:
    x = np.linspace(-30, 30, 6001)
    expected = TORCH[name](torch.from_numpy(x)).numpy()
    # Both in float64; theirs loses digits where 1 + erf and 1 + tanh are small.
    np.testing.assert_allclose(Activation(name)(x), expected, rtol=1e-12, atol=1e-14)


def test_the_reference_of_xielu_is_that_of_transformers() -> None:
    theirs = XIELUActivation(dtype=torch.float64)
    with torch.no_grad():
        theirs.alpha_p.fill_(0.3)
        theirs.alpha_n.fill_(-0.9)
        softplus = torch.nn.functional.softplus
        alphas = softplus(theirs.alpha_p).item(), softplus(theirs.alpha_n).item()
        x = torch.linspace(-30, 30, 6001, dtype=torch.float64)
        expected = theirs._xielu_python(x).numpy()
    ours = Activation("xielu", (*alphas, theirs.beta.item(), theirs.eps.item()))
    np.testing.assert_allclose(ours(x.numpy()), expected, rtol=1e-12, atol=1e-14)


def test_a_wrong_activation_is_an_error() -> None:
    with pytest.raises(ValueError, match="activation is 'swish', expected one of none, silu"):
        Activation("swish")
    with pytest.raises(ValueError, match="softcap got 0 parameters, expected 1: cap"):
        Activation("softcap")
    with pytest.raises(ValueError, match="silu got 1 parameters, expected 0: it has none"):
        Activation("silu", (1.0,))
    with pytest.raises(ValueError, match=r"call gate\(\)"):
        Activation("swiglu_oai", (7.0,))(np.zeros(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swiglu_oai", "activation_a": 7.0}, "'swiglu_oai', which needs a gate: set gated=1"),
        ({"activation": "softcap", "activation_a": 0.0}, "activation_a is 0, expected 1e-06 to 1e"),
        ({"activation": "softcap", "activation_a": float("inf")}, "activation_a is inf"),
        ({"output_scale": float("nan")}, "output_scale is nan, expected -1e"),
        ({"output_scale": 1e7}, r"output_scale is 1e\+07"),
        ({"epsilon": 1.5}, "epsilon is 1.5, expected 0 to 1"),
    ],
)
def test_wrong_attributes_are_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        linear(np.ones((1, 1)), np.ones((1, 1)), None, **change)


@pytest.mark.parametrize("isa", native.available_isas())
def test_on_every_instruction_set(isa: str) -> None:
    run_tests_on(isa, __file__)
