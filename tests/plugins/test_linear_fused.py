"""What `Linear` fuses: RMSNorm before it to the bit, the gate and the residual behind it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from pagelet.plugins import native
from pagelet.plugins.packing import LinearFormat, linear_reference, pack, rms_norm_reference

Float32 = npt.NDArray[np.float32]

EPSILON = 1e-5
FORMATS = [LinearFormat(4, 32, True), LinearFormat(4, 64, False), LinearFormat(8, 32, False)]
FUSED = native.selected_isa() != "portable"


def session_for(attributes: dict[str, Any], names: list[str], threads: int = 1) -> ort.InferenceSession:
    """One node over graph inputs `names`; the op's inputs that are not among them are left out."""
    inputs = [name if name in names else "" for name in ("x", "weight", "bias", "norm_weight", "residual")]
    node = helper.make_node("Linear", inputs, ["y"], domain="pagelet", **attributes)
    ranks = {"x": 2, "residual": 2, "weight": 1, "bias": 1, "norm_weight": 1}
    graph = helper.make_graph(
        [node],
        "fused",
        [
            helper.make_tensor_value_info(
                name, TensorProto.UINT8 if name == "weight" else TensorProto.FLOAT, [None] * ranks[name]
            )
            for name in names
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("pagelet", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # the tests look at the exceptions
    native.register_ops(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, ["CPUExecutionProvider"])


class Layer:
    """Random codes [N, K], and the op's answer over any of its inputs."""

    def __init__(self, format: LinearFormat, out_features: int, in_features: int) -> None:
        rng = np.random.default_rng(out_features)
        self.format, self.shape = format, (out_features, in_features)
        low, high = (0, 16) if format.bits == 4 else (-127, 128)
        codes = rng.integers(low, high, self.shape).astype(np.uint8 if format.bits == 4 else np.int8)
        scales, minimums = rng.normal(0, 0.02, (2, out_features, in_features // format.group_size))
        self.codes, self.scales = codes, scales.astype(np.float16)
        self.minimums = minimums.astype(np.float16) if format.asymmetric else None
        self.bias = rng.normal(size=out_features).astype(np.float32)
        self.norm = rng.normal(1, 0.3, in_features).astype(np.float32)

    def rows(self, count: int) -> Float32:
        rng = np.random.default_rng(count)
        rows = rng.normal(size=(count, self.shape[1])) * 10.0 ** rng.integers(-3, 4, (count, 1))
        return rows.astype(np.float32)

    def reference(self, x: Float32, bias: Float32 | None = None) -> Float32:
        return linear_reference(x, self.codes, self.scales, self.minimums, self.format, bias, FUSED)

    def attributes(self, **more: Any) -> dict[str, Any]:
        return {
            "out_features": self.shape[0],
            "in_features": self.shape[1],
            "weight_type": f"int{self.format.bits}",
            "group_size": self.format.group_size,
            "asymmetric": int(self.format.asymmetric),
            "epsilon": EPSILON,
            **more,
        }

    def run(self, threads: int = 1, gated: bool = False, **inputs: Float32) -> Float32:
        codes, scales, minimums = self.codes, self.scales, self.minimums
        if gated:  # gate and up alternate in tiles of 16
            codes, scales = interleaved(codes), interleaved(scales)
            minimums = None if minimums is None else interleaved(minimums)
        packed = pack(codes, scales, minimums, self.format)
        names = [name for name in ("x", "weight", "bias", "norm_weight", "residual") if name in inputs]
        session = session_for(self.attributes(gated=int(gated)), ["weight", *names], threads)
        y: Float32 = session.run(None, {"weight": packed, **inputs})[0]
        return y


def interleaved(rows: Any) -> Any:
    pairs = rows.reshape(2, -1, 16, rows.shape[1]).swapaxes(0, 1)
    return np.ascontiguousarray(pairs).reshape(rows.shape)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("in_features", [128, 576])
def test_the_norm_is_the_reference_to_the_bit(format: LinearFormat, in_features: int) -> None:
    layer = Layer(format, 50, in_features)
    for rows in (1, 3, 20):
        x = layer.rows(rows)
        normed = rms_norm_reference(x, layer.norm, EPSILON, FUSED)
        np.testing.assert_array_equal(layer.run(x=x, norm_weight=layer.norm), layer.reference(normed))


def test_the_norm_is_rms_norm() -> None:
    x = Layer(FORMATS[0], 16, 576).rows(5)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPSILON)
    # Sums of 36 squares per lane, a tree, a root, a division and two products: a few roundings of 2^-24.
    np.testing.assert_allclose(rms_norm_reference(x, np.ones(576, np.float32), EPSILON), expected, rtol=4e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_the_residual_is_added_last(format: LinearFormat) -> None:
    layer = Layer(format, 50, 256)
    for rows in (1, 6, 70, 1030):  # the op takes 512 at once
        x = layer.rows(rows)
        residual = layer.rows(rows)[:, :50].copy()
        y = layer.run(x=x, bias=layer.bias, residual=residual)
        np.testing.assert_array_equal(y, layer.reference(x, layer.bias) + residual)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_layer_is_silu_of_the_gate_times_the_rest(format: LinearFormat, bias: bool) -> None:
    layer = Layer(format, 2 * 48, 256)
    for rows in (1, 5, 70):
        x = layer.rows(rows)
        inputs = {"x": x} | ({"bias": layer.bias} if bias else {})
        gate, up = np.split(layer.reference(x, layer.bias if bias else None).astype(np.float64), 2, axis=1)
        with np.errstate(over="ignore"):
            expected = gate / (1 + np.exp(-gate)) * up
        # e^x to 1 ulp, a sum, a quotient and a product: 5 roundings of 2^-24. Below -88.3 e^-x stays e^88.3.
        y, least = layer.run(gated=True, **inputs), 5e-39 * np.abs(gate * up).max()
        np.testing.assert_allclose(y, expected, rtol=3e-7, atol=least)


def test_a_row_is_the_same_in_every_batch_and_on_every_number_of_threads() -> None:
    layer = Layer(FORMATS[0], 2 * 80, 192)
    x = layer.rows(600)
    whole = layer.run(gated=True, x=x, bias=layer.bias, norm_weight=layer.norm)
    for rows in (1, 2, 9, 33, 513):
        part = layer.run(gated=True, threads=2, x=x[:rows], bias=layer.bias, norm_weight=layer.norm)
        np.testing.assert_array_equal(part, whole[:rows])


def test_wrong_shapes_are_errors() -> None:
    layer = Layer(FORMATS[0], 32, 64)
    x = layer.rows(2)
    with pytest.raises(Exception, match=r"norm_weight has shape \[63\], expected \[64\]"):
        layer.run(x=x, norm_weight=layer.norm[:63])
    with pytest.raises(Exception, match=r"residual has shape \[2, 31\], expected \[2, 32\]"):
        layer.run(x=x, residual=np.zeros((2, 31), np.float32))
    with pytest.raises(Exception, match=r"residual has shape \[1, 32\], expected \[2, 32\]"):
        layer.run(x=x, residual=np.zeros((1, 32), np.float32))
    with pytest.raises(Exception, match=r"residual has shape \[2, 32\], expected \[2, 16\]"):
        layer.run(gated=True, x=x, residual=np.zeros((2, 32), np.float32))
