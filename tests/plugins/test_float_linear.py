"""Linear and Embedding over weights that are floats are the NumPy reference to the bit, on every CPU path."""

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from pagelet.plugins import native
from pagelet.plugins.float_packing import (
    FloatFormat,
    FloatParts,
    dequantize,
    float_linear_reference,
    pack,
    quantize,
    to_float32,
)
from pagelet.plugins.packing import rms_norm_reference

Float32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

PLAIN = [FloatFormat("f32"), FloatFormat("f16"), FloatFormat("bf16")]
FP8 = [FloatFormat("fp8", group_size) for group_size in (0, 32, 64, 128)]
FORMATS = [*PLAIN, *FP8]
FUSED = native.selected_isa() != "portable"


class Layer:
    """A weight [N, K], and the ops' answers over it."""

    def __init__(self, format: FloatFormat, parts: FloatParts, threads: int = 1) -> None:
        self.format, self.parts, self.threads = format, parts, threads
        self.packed = pack(*parts, format)

    def attributes(self, **more: Any) -> dict[str, Any]:
        out_features, in_features = self.parts[0].shape
        return {
            "in_features": in_features,
            "out_features": out_features,
            "weight_type": self.format.weight_type,
            "group_size": self.format.group_size,
            **more,
        }

    def linear(self, x: Float32, **inputs: Array) -> Float32:
        given = {"x": x, "weight": self.packed, **inputs}
        return run("Linear", self.attributes(), given, self.threads)

    def embedding(self, ids: Array) -> Float32:
        return run("Embedding", self.attributes(), {"ids": ids, "weight": self.packed}, self.threads)

    def reference(self, x: Float32, bias: Float32 | None = None) -> Float32:
        return float_linear_reference(x, *self.parts, self.format, bias, FUSED)


def random_layer(format: FloatFormat, out_features: int, in_features: int, threads: int = 1) -> Layer:
    """Columns of very different magnitude."""
    rng = np.random.default_rng(out_features + in_features)
    magnitudes = 10.0 ** rng.integers(-2, 3, (out_features, 1))
    weight = (rng.normal(size=(out_features, in_features)) * magnitudes).astype(np.float32)
    return Layer(format, quantize(weight, format), threads)


def run(op: str, attributes: Mapping[str, Any], inputs: Mapping[str, Array], threads: int = 1) -> Float32:
    ranks = tuple((name, array.dtype.name, array.ndim) for name, array in inputs.items())
    y: Float32 = session_for(op, tuple(attributes.items()), ranks, threads).run(None, dict(inputs))[0]
    return y


@lru_cache(maxsize=32)
def session_for(
    op: str, attributes: tuple[tuple[str, Any], ...], inputs: tuple[tuple[str, str, int], ...], threads: int
) -> ort.InferenceSession:
    """One node over graph inputs of (name, dtype, rank); the op's optional ones may be left out."""
    order = ("x", "weight", "bias", "norm_weight", "residual") if op == "Linear" else ("ids", "weight")
    given = {name for name, _, _ in inputs}
    node = helper.make_node(
        op, [name if name in given else "" for name in order], ["y"], domain="pagelet", **dict(attributes)
    )
    types = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8, "int64": TensorProto.INT64}
    graph = helper.make_graph(
        [node],
        "float",
        [helper.make_tensor_value_info(name, types[dtype], [None] * rank) for name, dtype, rank in inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("pagelet", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # the tests look at the exceptions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    native.register_ops(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, ["CPUExecutionProvider"])


def random_rows(rows: int, in_features: int, seed: int = 0) -> Float32:
    """Rows of very different magnitude."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, in_features)) * 10.0 ** rng.integers(-6, 6, (rows, 1))
    return x.astype(np.float32)


# One output, a tile's part, several strips of tiles; K below, at and beyond a panel of 256 inputs.
SHAPES = [(1, 1), (33, 7), (50, 257), (16, 256), (150, 640)]
CASES = [
    (format, *shape) for format in FORMATS for shape in SHAPES if shape[1] % (format.group_size or 1) == 0
]


@pytest.mark.parametrize(("format", "out_features", "in_features"), CASES)
def test_linear_equals_the_reference(format: FloatFormat, out_features: int, in_features: int) -> None:
    layer = random_layer(format, out_features, in_features)
    bias = random_rows(1, out_features)[0]
    for rows in (1, 2, 3, 7, 24):
        x = random_rows(rows, in_features, seed=rows)
        np.testing.assert_array_equal(layer.linear(x, bias=bias), layer.reference(x, bias))


@pytest.mark.parametrize("format", FORMATS)
def test_every_number_of_rows(format: FloatFormat) -> None:
    layer = random_layer(format, 90, 128)
    x = random_rows(70, 128)
    expected = layer.reference(x)
    for rows in range(1, 71):
        np.testing.assert_array_equal(layer.linear(x[:rows]), expected[:rows])


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_the_same_in_every_batch_and_on_every_number_of_threads(format: FloatFormat) -> None:
    one, two = random_layer(format, 200, 640), random_layer(format, 200, 640, threads=2)
    x = random_rows(1100, 640)
    whole = two.linear(x)
    for rows in (1, 5, 64, 97, 512, 513):
        np.testing.assert_array_equal(one.linear(x[:rows]), whole[:rows])
    np.testing.assert_array_equal(one.linear(x[5:70]), whole[5:70])
    assert one.linear(x[:0]).shape == (0, 200)


@pytest.mark.parametrize("format", FORMATS)
def test_not_finite_activations_stay_in_their_row(format: FloatFormat) -> None:
    layer = random_layer(format, 40, 128)
    x = random_rows(20, 128)
    clean = layer.linear(x)
    dirty = x.copy()
    dirty[2, 7], dirty[3, 100], dirty[15, 127] = np.nan, np.inf, -np.inf
    y = layer.linear(dirty)
    weight = dequantize(*layer.parts, layer.format)
    assert np.isnan(y[2]).all()
    with np.errstate(invalid="ignore"):  # infinity times a weight of zero is NaN
        np.testing.assert_array_equal(y[3], weight[:, 100] * np.float32(np.inf))
        np.testing.assert_array_equal(y[15], weight[:, 127] * np.float32(-np.inf))
    finite = ~np.isin(np.arange(20), (2, 3, 15))
    np.testing.assert_array_equal(y[finite], clean[finite])


def all_numbers(format: FloatFormat) -> Array:
    """Every finite number of the format, [N, 1]; of f32, those whose lower halves are zero."""
    if format.type == "f32":
        numbers: Array = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    else:
        codes = np.arange(2 ** (8 * format.dtype.itemsize))
        numbers = codes.astype(f"u{format.dtype.itemsize}").view(format.dtype)
    return numbers[np.isfinite(to_float32(numbers, format))][:, None]


@pytest.mark.parametrize("format", [*PLAIN, FloatFormat("fp8")])
def test_every_number_is_read_as_it_is(format: FloatFormat) -> None:
    """By both ops, subnormals included; one and many rows go different ways."""
    numbers = all_numbers(format)
    scales = None
    if format.type == "fp8":
        scales = np.linspace(0.5, 4, len(numbers), dtype=np.float32)[:, None]
    layer = Layer(format, (numbers, scales))
    values = dequantize(numbers, scales, format)
    np.testing.assert_array_equal(layer.embedding(np.arange(len(numbers))), values)
    for rows in (1, 20):
        np.testing.assert_array_equal(
            layer.linear(np.ones((rows, 1), np.float32)), np.tile(values[:, 0], (rows, 1))
        )


@pytest.mark.parametrize("format", FORMATS)
def test_embedding_rows_are_the_dequantized_rows(format: FloatFormat) -> None:
    layer = random_layer(format, 77, 384, threads=2)
    ids = np.array([76, 0, 15, 16, 0, *range(77)], np.int64)
    np.testing.assert_array_equal(layer.embedding(ids), dequantize(*layer.parts, format)[ids])


@pytest.mark.parametrize("format", [*PLAIN, FloatFormat("fp8", 64)])
def test_norm_and_residual_are_fused(format: FloatFormat) -> None:
    layer = random_layer(format, 50, 192)
    norm = random_rows(1, 192)[0]
    for rows in (1, 6, 70):
        x = random_rows(rows, 192, seed=rows)
        residual = x[:, :50].copy()
        normed = rms_norm_reference(x, norm, 1e-5, FUSED)
        y = layer.linear(x, norm_weight=norm, residual=residual)
        np.testing.assert_array_equal(y, layer.reference(normed) + residual)


@pytest.mark.parametrize("in_features", [1, 15, 16, 40, 577])
def test_the_norm_of_any_width(in_features: int) -> None:
    layer = random_layer(FloatFormat("f32"), 20, in_features)
    norm = np.random.default_rng(0).normal(1, 0.2, in_features).astype(np.float32)
    x = random_rows(3, in_features)
    normed = rms_norm_reference(x, norm, 1e-5, FUSED)
    np.testing.assert_array_equal(layer.linear(x, norm_weight=norm), layer.reference(normed))


@pytest.mark.parametrize("format", [*PLAIN, FloatFormat("fp8")])
def test_a_gated_layer_is_silu_of_the_gate_times_the_rest(format: FloatFormat) -> None:
    """Pairs of tiles: the reference's columns 32i to 32i + 15 gate the next sixteen."""
    layer = random_layer(format, 2 * 48, 100)
    attributes = layer.attributes(gated=1)
    for rows in (1, 5, 70):
        x = random_rows(rows, 100, seed=rows) / np.float32(1e4)
        pairs = layer.reference(x).astype(np.float64).reshape(rows, 3, 2, 16)
        gate, up = pairs[:, :, 0].reshape(rows, -1), pairs[:, :, 1].reshape(rows, -1)
        y = run("Linear", attributes, {"x": x, "weight": layer.packed})
        with np.errstate(over="ignore"):
            expected = gate / (1 + np.exp(-gate)) * up
        # e^x to 1 ulp, a sum, a quotient and a product: 5 roundings of 2^-24. Below -88.3 e^-x stays e^88.3.
        np.testing.assert_allclose(y, expected, rtol=3e-7, atol=5e-39 * np.abs(gate * up).max())


@pytest.mark.parametrize("format", [*PLAIN, *FP8[:2]])
@pytest.mark.parametrize("change", [-1, 1, -320, 320])
def test_a_weight_of_the_wrong_size_is_an_error(format: FloatFormat, change: int) -> None:
    layer = random_layer(format, 40, 64)
    size = len(layer.packed)
    layer.packed = np.zeros(size + change, np.uint8)
    message = rf"weight has shape \[{size + change}\], expected \[{size}\]"
    with pytest.raises(Exception, match=message):
        layer.linear(random_rows(1, 64))
    with pytest.raises(Exception, match=message):
        layer.embedding(np.zeros(1, np.int64))


@pytest.mark.parametrize("format", FORMATS[:4])
def test_a_wrong_input_is_an_error(format: FloatFormat) -> None:
    layer = random_layer(format, 24, 64)
    with pytest.raises(Exception, match=r"input has shape \[2, 32\], expected \[any, 64\]"):
        layer.linear(np.zeros((2, 32), np.float32))
    with pytest.raises(Exception, match=r"bias has shape \[23\], expected \[24\]"):
        layer.linear(random_rows(2, 64), bias=np.zeros(23, np.float32))
    with pytest.raises(Exception, match=r"input_ids\[1\] is 24, expected 0 to 23"):
        layer.embedding(np.array([3, 24], np.int64))


@pytest.mark.parametrize(
    ("format", "change", "message"),
    [
        (FloatFormat("f16"), {"group_size": 32}, "of plain floats 0"),
        (FloatFormat("fp8"), {"group_size": 48}, "group_size is 48 for 64 inputs"),
        (FloatFormat("fp8"), {"group_size": 128}, "group_size is 128 for 64 inputs"),
        (FloatFormat("fp8"), {"asymmetric": 1}, "which only int4 weights can be"),
        (FloatFormat("f32"), {"weight_type": "f64"}, "weight_type is 'f64'"),
    ],
)
def test_wrong_attributes_are_errors(format: FloatFormat, change: dict[str, Any], message: str) -> None:
    layer = random_layer(format, 16, 64)
    with pytest.raises(Exception, match=message):
        run("Linear", layer.attributes(**change), {"x": random_rows(1, 64), "weight": layer.packed})


@pytest.mark.parametrize("isa", native.available_isas())
def test_on_every_instruction_set(isa: str) -> None:
    """The other tests of this file again, in a process that is told to use this instruction set."""
    if isa == native.selected_isa():
        pytest.skip("the tests of this process run on it")
    command = [sys.executable, "-m", "pytest", "-pno:cacheprovider", "-knot instruction_set", __file__]
    environment = os.environ | {"PAGELET_ISA": isa}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
