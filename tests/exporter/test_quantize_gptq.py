"""GPTQ against the paper's algorithm written plainly, and what it promises for any weight and Hessian."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagelet.exporter.quantize.gptq import Gptq
from pagelet.exporter.quantize.output_error import output_error
from pagelet.exporter.quantize.rounding import nearest_codes, restore, round_to_nearest, search_parameters
from pagelet.plugins.packing import LinearFormat, Quantized, dequantize, pack, quantize_rtn

FORMATS = [
    LinearFormat(bits, group_size, asymmetric)
    for bits, asymmetric in ((4, False), (4, True), (8, False))
    for group_size in (32, 64, 128)
]
SIZE = 256


def activations(seed: int, tokens: int = 600, outliers: int = 4) -> NDArray[np.float64]:
    """Correlated, heavy-tailed inputs [tokens, SIZE], a few of them far larger than the others."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((SIZE // 4, SIZE)) / 4
    x = rng.standard_t(4, (tokens, SIZE // 4)) @ mixing + 0.5 * rng.standard_t(4, (tokens, SIZE))
    x[:, rng.choice(SIZE, outliers, replace=False)] *= 15
    return x


def hessian_of(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x.T @ x / len(x)


def weight_of(seed: int, rows: int = 24) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (0.03 * rng.standard_t(5, (rows, SIZE))).astype(np.float32)


def plain_gptq(
    weight: NDArray[np.float32], hessian: NDArray[np.float64], format: LinearFormat, desc_act: bool
) -> NDArray[np.float64]:
    """Algorithm 1 of the paper, unblocked, in float64: the restored weight [N, K]; no dead inputs."""
    diagonal = hessian.diagonal()
    order = np.argsort(-diagonal, kind="stable") if desc_act else np.arange(SIZE)
    damped = hessian + 0.01 * diagonal.mean() * np.eye(SIZE)
    factor = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    w, restored = weight.astype(np.float64)[:, order], np.empty(weight.shape)
    parameters = {}
    size = format.group_size

    def search(group: int, values: NDArray[np.float64]) -> None:
        importance = diagonal[None, group * size : (group + 1) * size]
        parameters[group] = search_parameters(values.T.astype(np.float32)[None], importance, format)

    if desc_act:
        for group in range(SIZE // size):
            search(group, weight[:, group * size : (group + 1) * size])
    for i, k in enumerate(order):
        if not desc_act and i % size == 0:
            search(i // size, w[:, i : i + size])
        scale, minimum = (None if p is None else p[0].astype(np.float64) for p in parameters[k // size])
        codes = nearest_codes(w[:, i], (scale, minimum), format)
        restored[:, k] = restore(codes, (scale, minimum))
        error = (w[:, i] - restored[:, k]) / factor[i, i]
        w[:, i:] -= error[:, None] * factor[None, i, i:]
    return restored


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_equals_the_papers_algorithm(format: LinearFormat, desc_act: bool) -> None:
    """The errors, not the codes: a target within float32's rounding of a tie changes all codes after it."""
    hessian, weight = hessian_of(activations(1)), weight_of(2, rows=100)
    reference = plain_gptq(weight, hessian, format, desc_act)
    codes = Gptq(hessian, format, desc_act=desc_act, sweeps=0)(weight)
    restored = dequantize(*codes, format)
    same = (np.abs(restored - reference) < 1e-6).all(axis=1)  # far below a step of any group
    assert same.mean() > 0.8
    expected = output_error(weight, reference.astype(np.float32), hessian)
    # A row may have been rounded to nearest instead, which only lowers it.
    assert output_error(weight, restored, hessian).sum() <= expected.sum() * 1.001


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(FORMATS), st.booleans(), st.sampled_from([3, 40, 600]))
def test_no_row_is_worse_than_rounding(seed: int, format: LinearFormat, desc_act: bool, tokens: int) -> None:
    """Few tokens give a singular Hessian, many an ordinary one."""
    hessian, weight = hessian_of(activations(seed, tokens)), weight_of(seed + 1, rows=9)
    found = Gptq(hessian, format, desc_act=desc_act)(weight)
    pack(*found, format)
    importance = hessian.diagonal()
    error = output_error(weight, dequantize(*found, format), hessian)
    for rounded in (quantize_rtn(weight, format), round_to_nearest(weight, format, importance)):
        # Products of other shapes sum in another order: 1e-9 of what plain rounding costs.
        bound = output_error(weight, dequantize(*rounded, format), hessian)
        assert (error <= bound + 1e-9 * bound.max()).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_each_stage_gains(format: LinearFormat) -> None:
    hessian, weight = hessian_of(activations(3)), weight_of(4, rows=64)

    def cost(parts: Quantized) -> float:
        return float(output_error(weight, dequantize(*parts, format), hessian).sum())

    nearest = cost(round_to_nearest(weight, format, hessian.diagonal()))
    compensated, swept = (cost(Gptq(hessian, format, sweeps=sweeps)(weight)) for sweeps in (0, 3))
    assert swept < compensated < nearest < cost(quantize_rtn(weight, format))


def test_output_error_is_the_mean_squared_output_error() -> None:
    x, weight = activations(5), weight_of(6)
    restored = weight + weight_of(7)
    expected = ((x @ (weight - restored).T.astype(np.float64)) ** 2).mean(axis=0)
    # weight - restored is taken in float32 here and in float64 there: 2^-24 of the sum, twice.
    np.testing.assert_allclose(output_error(weight, restored, hessian_of(x)), expected, rtol=1e-5)


@pytest.mark.parametrize("desc_act", [False, True])
def test_pieces_of_a_weight_equal_the_whole(desc_act: bool) -> None:
    format = LinearFormat(4, 32, asymmetric=True)
    quantizer, weight = Gptq(hessian_of(activations(8)), format, desc_act=desc_act), weight_of(9, rows=530)
    whole = quantizer(weight)
    pieces = [quantizer(weight[start:stop]) for start, stop in ((0, 16), (16, 117), (117, 530))]
    for part, parts in zip(whole, zip(*pieces, strict=True), strict=True):
        np.testing.assert_array_equal(part, np.concatenate(parts))


@pytest.mark.parametrize("desc_act", [False, True])
def test_dead_inputs_round_to_nearest(desc_act: bool) -> None:
    x = activations(10)
    dead = np.r_[0, 5, 64:96, 200]
    x[:, dead] = 0
    format = LinearFormat(4, 32, asymmetric=False)
    quantizer, weight = Gptq(hessian_of(x), format, desc_act=desc_act), weight_of(11)
    assert quantizer.dead_inputs == len(dead)
    restored = dequantize(*(found := quantizer(weight)), format)
    scales = np.repeat(np.abs(found[1].astype(np.float32)), 32, axis=1)
    error = np.abs(weight - restored)[:, dead]
    unclipped = (np.abs(weight) <= 7 * scales)[:, dead]
    assert unclipped.mean() > 0.8
    # Half a step, and float32's rounding of w / s.
    assert (error <= 0.5001 * scales[:, dead])[unclipped].all()


def test_a_hessian_of_dead_inputs_alone_rounds_to_nearest() -> None:
    format, weight = LinearFormat(4, 64, asymmetric=True), weight_of(12)
    quantizer = Gptq(np.zeros((SIZE, SIZE)), format)
    assert quantizer.dead_inputs == SIZE
    found = dequantize(*quantizer(weight), format)
    plain = dequantize(*quantize_rtn(weight, format), format)
    assert ((weight - found) ** 2).sum() <= ((weight - plain) ** 2).sum()


def test_hessians_that_cannot_serve_are_refused() -> None:
    format = LinearFormat(4, 32)
    hessian = hessian_of(activations(13))
    with pytest.raises(ValueError, match=r"NaN or infinity.*--quantizer rtn"):
        Gptq(np.where(np.eye(SIZE) > 0, np.nan, hessian), format)
    with pytest.raises(ValueError, match=r"not positive definite.*more text or use --quantizer rtn"):
        Gptq(hessian - 100 * np.diag(hessian.diagonal()) * (1 - np.eye(SIZE)) - 20 * hessian.mean(), format)
    with pytest.raises(ValueError, match="expected \\[K, K\\]"):
        Gptq(hessian[:, :32], format)
    with pytest.raises(ValueError, match="positive multiple of group_size"):
        Gptq(hessian[:40, :40], format)
    with pytest.raises(ValueError, match="expected \\[n, 256\\]"):
        Gptq(hessian, format)(np.ones((2, 128), np.float32))
