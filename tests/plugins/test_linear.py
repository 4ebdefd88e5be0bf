"""Linear and Embedding over integer weights are the NumPy reference to the bit, on every instruction set."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from pagelet.plugins import native
from pagelet.plugins.packing import (
    Codes,
    LinearFormat,
    Quantized,
    dequantize,
    linear_reference,
    pack,
    quantize_rtn,
)

Float32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

FORMATS = [
    LinearFormat(bits, group_size, asymmetric)
    for bits, asymmetric in ((4, True), (4, False), (8, False))
    for group_size in (32, 64, 128)
]
MAIN_FORMATS = [LinearFormat(4, 32, True), LinearFormat(4, 64, False), LinearFormat(8, 128, False)]


def random_parts(out_features: int, in_features: int, format: LinearFormat, seed: int = 0) -> Quantized:
    """Codes over the whole range, -128 included, with scales and minimums of either sign."""
    rng = np.random.default_rng(seed)
    codes: Codes
    if format.bits == 4:
        codes = rng.integers(0, 16, (out_features, in_features), np.uint8)
    else:
        codes = rng.integers(-128, 128, (out_features, in_features), np.int8)
    shape = (out_features, in_features // format.group_size)
    scales, minimums = rng.normal(0, 0.05, (2, *shape)).astype(np.float16)
    return codes, scales, minimums if format.asymmetric else None


def random_rows(rows: int, in_features: int, seed: int = 0) -> Float32:
    """Rows of very different magnitude, with ties at half a step and codes at both ends of the range."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, in_features)) * 10.0 ** rng.integers(-6, 6, (rows, 1))
    steps = rng.integers(-127, 127, x.shape) + 0.5
    ties = rng.random((rows, 1)) < 0.3
    return np.where(ties, np.where(np.arange(in_features) % 32 == 0, 127, steps), x).astype(np.float32)


def attributes(in_features: int, out_features: int, format: LinearFormat) -> dict[str, Any]:
    return {
        "in_features": in_features,
        "out_features": out_features,
        "weight_type": f"int{format.bits}",
        "group_size": format.group_size,
        "asymmetric": int(format.asymmetric),
    }


def session_for(
    op: str, packed: Array, attributes: Mapping[str, Any], bias: Float32 | None = None, threads: int = 1
) -> ort.InferenceSession:
    """A session with one node, whose weight and bias are initializers."""
    initializers = {"weight": packed} | ({} if bias is None else {"bias": bias})
    values: dict[str, Any] = {**attributes}
    node = helper.make_node(op, ["x", *initializers], ["y"], domain="pagelet", **values)
    linear = op == "Linear"
    element, rank = (TensorProto.FLOAT, 2) if linear else (TensorProto.INT64, 1)
    graph = helper.make_graph(
        [node],
        "linear",
        [helper.make_tensor_value_info("x", element, [None] * rank)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("pagelet", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # the tests look at the exceptions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    native.register_ops(options)
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def run(session: ort.InferenceSession, x: Array) -> Float32:
    result: Float32 = session.run(None, {"x": x})[0]
    return result


@lru_cache(maxsize=8)
def linear(
    format: LinearFormat, out_features: int, in_features: int, threads: int = 1
) -> Callable[[Float32], Float32]:
    packed = pack(*random_parts(out_features, in_features, format), format)
    session = session_for("Linear", packed, attributes(in_features, out_features, format), threads=threads)
    return lambda x: run(session, x)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 128), (50, 384), (33, 2176), (16, 5120)])
def test_linear_equals_the_reference(format: LinearFormat, out_features: int, in_features: int) -> None:
    parts = random_parts(out_features, in_features, format)
    bias = np.random.default_rng(1).normal(size=out_features).astype(np.float32)
    packed = pack(*parts, format)
    session = session_for("Linear", packed, attributes(in_features, out_features, format), bias)
    fused = native.selected_isa() != "portable"
    for rows in (1, 3, 7, 24):
        x = random_rows(rows, in_features, seed=rows)
        np.testing.assert_array_equal(run(session, x), linear_reference(x, *parts, format, bias, fused))


@pytest.mark.parametrize("in_features", [32, 64, 96, 512, 544])
def test_every_number_of_blocks_in_a_panel(in_features: int) -> None:
    format = LinearFormat(4, 32, True)
    x = random_rows(21, in_features)
    expected = linear_reference(
        x, *random_parts(17, in_features, format), format, fused=native.selected_isa() != "portable"
    )
    np.testing.assert_array_equal(linear(format, 17, in_features)(x), expected)


@pytest.mark.parametrize("format", MAIN_FORMATS)
def test_a_row_is_the_same_in_every_batch(format: LinearFormat) -> None:
    out_features, in_features = 70, 640
    multiply = linear(format, out_features, in_features)
    x = random_rows(1100, in_features)
    alone = np.concatenate([multiply(x[i : i + 1]) for i in range(len(x))])
    for rows in (*range(1, 41), 512, 513, 1100):
        np.testing.assert_array_equal(multiply(x[:rows]), alone[:rows])
    np.testing.assert_array_equal(multiply(x[5:70]), alone[5:70])


@pytest.mark.parametrize("format", MAIN_FORMATS)
def test_threads_do_not_change_the_result(format: LinearFormat) -> None:
    x = random_rows(512, 384)
    for out_features in (1, 16, 100, 4000):
        for rows in (1, 5, 512):
            one = linear(format, out_features, 384, 1)(x[:rows])
            np.testing.assert_array_equal(linear(format, out_features, 384, 2)(x[:rows]), one)


def test_concurrent_runs_of_one_session() -> None:
    multiply = linear(MAIN_FORMATS[0], 200, 512, 2)
    inputs = [random_rows(rows, 512, seed=rows) for rows in (1, 3, 60, 600)]
    expected = [multiply(x) for x in inputs]
    failures: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not np.array_equal(multiply(inputs[i]), expected[i]):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("format", MAIN_FORMATS)
def test_not_finite_activations_stay_in_their_row(format: LinearFormat) -> None:
    multiply = linear(format, 40, 256)
    x = random_rows(20, 256)
    clean = multiply(x)
    dirty = x.copy()
    dirty[2, 7], dirty[3, 100], dirty[15, 255] = np.nan, np.inf, -np.inf
    y = multiply(dirty)
    rows = np.isin(np.arange(20), (2, 3, 15))
    assert np.isnan(y[rows]).all()
    np.testing.assert_array_equal(y[~rows], clean[~rows])


def test_extreme_activations() -> None:
    format = LinearFormat(4, 32, True)
    multiply = linear(format, 16, 128)
    largest = np.full((1, 128), 3e38, np.float32)
    assert np.isfinite(multiply(np.full((1, 128), 1e34, np.float32))).all()
    assert not np.isnan(multiply(largest * np.float32(1e-4))).any()
    multiply(largest)  # may overflow to infinity; must not trap
    for small in (0.0, -0.0, 1e-45, 1e-38, 2.0**-101):
        np.testing.assert_array_equal(multiply(np.full((1, 128), small, np.float32)), 0)
    # Around 2^-99 codes are still taken: one input of a block at full scale gives the scale itself.
    parts = random_parts(16, 128, format)
    x = np.full((1, 128), 2.0**-99, np.float32)
    fused = native.selected_isa() != "portable"
    np.testing.assert_array_equal(multiply(x), linear_reference(x, *parts, format, None, fused))


def test_no_rows() -> None:
    assert linear(MAIN_FORMATS[0], 24, 64)(np.empty((0, 64), np.float32)).shape == (0, 24)


@pytest.mark.parametrize("format", FORMATS)
def test_embedding_rows_are_the_dequantized_rows(format: LinearFormat) -> None:
    parts = random_parts(77, 384, format)
    packed = pack(*parts, format)
    session = session_for("Embedding", packed, attributes(384, 77, format), threads=2)
    ids = np.array([76, 0, 15, 16, 0, *range(77)], np.int64)
    np.testing.assert_array_equal(run(session, ids), dequantize(*parts, format)[ids])
    assert run(session, ids[:0]).shape == (0, 384)


def test_embedding_of_subnormal_scales() -> None:
    format = LinearFormat(4, 32, True)
    codes, scales, minimums = random_parts(16, 32, format)
    assert minimums is not None
    scales[:8], minimums[:4] = np.float16(-3 * 2.0**-24), np.float16(2.0**-15)
    session = session_for("Embedding", pack(codes, scales, minimums, format), attributes(32, 16, format))
    expected = dequantize(codes, scales, minimums, format)
    np.testing.assert_array_equal(run(session, np.arange(16)), expected)


@pytest.mark.parametrize("bad", [-1, 77, 2**62, -(2**63)])
def test_an_id_outside_the_table_is_an_error(bad: int) -> None:
    format = MAIN_FORMATS[0]
    parts = random_parts(77, 64, format)
    session = session_for("Embedding", pack(*parts, format), attributes(64, 77, format))
    with pytest.raises(Exception, match=rf"input_ids\[1\] is {bad}, expected 0 to 76"):
        run(session, np.array([3, bad], np.int64))
    np.testing.assert_array_equal(run(session, np.array([3])), dequantize(*parts, format)[[3]])


@pytest.mark.parametrize("op", ["Linear", "Embedding"])
@pytest.mark.parametrize("change", [-1, 1, -320, 320])
def test_a_weight_of_the_wrong_size_is_an_error(op: str, change: int) -> None:
    format = LinearFormat(4, 32, True)
    size = format.packed_bytes(64, 40)
    session = session_for(op, np.zeros(size + change, np.uint8), attributes(64, 40, format))
    x = np.zeros((1, 64), np.float32) if op == "Linear" else np.zeros(1, np.int64)
    with pytest.raises(Exception, match=rf"weight has shape \[{size + change}\], expected \[{size}\]"):
        run(session, x)


def test_a_wrong_input_is_an_error_and_the_session_works_after() -> None:
    multiply = linear(MAIN_FORMATS[0], 24, 64)
    good = random_rows(2, 64)
    expected = multiply(good)
    with pytest.raises(Exception, match=r"input has shape \[2, 32\], expected \[any, 64\]"):
        multiply(np.zeros((2, 32), np.float32))
    np.testing.assert_array_equal(multiply(good), expected)
    bias = np.zeros(23, np.float32)
    packed = pack(*random_parts(24, 64, MAIN_FORMATS[0]), MAIN_FORMATS[0])
    session = session_for("Linear", packed, attributes(64, 24, MAIN_FORMATS[0]), bias)
    with pytest.raises(Exception, match=r"bias has shape \[23\], expected \[24\]"):
        run(session, good)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_type": "int5"}, "weight_type is 'int5', expected one of int4, int8, fp8, bf16, f16, f32"),
        ({"weight_type": "f" * 80}, "weight_type is '', expected one of"),
        ({"weight_type": "int8"}, "asymmetric is 1, which only int4 weights can be"),
        ({"group_size": 96}, "group_size is 96 for 64 inputs: expected 32, 64 or 128 that divides them"),
        ({"group_size": 128}, "group_size is 128 for 64 inputs"),
        ({"group_size": 16}, "group_size is 16 for 64 inputs"),
        ({"group_size": -1}, "group_size is -1, expected 0 to"),
        ({"in_features": 0}, "in_features is 0"),
        ({"out_features": 2**40}, "out_features is 1099511627776"),
        ({"asymmetric": 2}, "asymmetric is 2, expected 0 to 1"),
        ({"gated": 2}, "gated is 2, expected 0 to 1"),
        ({"epsilon": -1.0}, "epsilon is -1, expected 0 to 1"),
        ({"epsilon": float("nan")}, "epsilon is nan, expected 0 to 1"),
        ({"gated": 1}, "out_features is 16 of a gated layer: expected a multiple of 32"),
    ],
)
def test_wrong_attributes_are_errors(change: dict[str, Any], message: str) -> None:
    wrong = attributes(64, 16, LinearFormat(4, 32, True)) | change
    with pytest.raises(Exception, match=message):
        session_for("Linear", np.zeros(640, np.uint8), wrong)


def test_a_quantized_weight_multiplies_like_the_weight() -> None:
    rng = np.random.default_rng(4)
    weight = rng.normal(size=(48, 512)).astype(np.float32)
    x = rng.normal(size=(6, 512)).astype(np.float32)
    exact = x.astype(np.float64) @ weight.T
    # The relative error of rounding normal values to 15 steps per 32, or to 255, beside that of activations.
    for format, limit in ((LinearFormat(4, 32, True), 0.1), (LinearFormat(8, 32, False), 0.012)):
        packed = pack(*quantize_rtn(weight, format), format)
        y = run(session_for("Linear", packed, attributes(512, 48, format)), x)
        assert np.linalg.norm(y - exact) < limit * np.linalg.norm(exact)


@pytest.mark.parametrize("isa", native.available_isas())
def test_on_every_instruction_set(isa: str) -> None:
    """The other tests of this file again, in a process that is told to use this instruction set."""
    if isa == native.selected_isa():
        pytest.skip("the tests of this process run on it")
    command = [sys.executable, "-m", "pytest", "-pno:cacheprovider", "-knot instruction_set", __file__]
    environment = os.environ | {"PAGELET_ISA": isa}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
