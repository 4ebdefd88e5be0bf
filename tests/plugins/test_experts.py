"""Experts against NumPy and against nodes of Linear, and a row's bits whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import FORMATS, FUSED, Format, mixture, random_rows, routed
from one_node import run_tests_on

from pagelet.plugins import native
from pagelet.plugins.activations import Activation
from pagelet.plugins.packing import LinearFormat, rms_norm_reference
from pagelet.plugins.reference_experts import MAX_EXPERTS, ROUTINGS, experts_reference, routing_weights


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


@pytest.mark.parametrize("isa", native.available_isas())
def test_on_every_instruction_set(isa: str) -> None:
    run_tests_on(isa, __file__)
