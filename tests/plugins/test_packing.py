"""Packed weights: the byte layout, round trips, streaming, and the rules of rounding to nearest."""

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagelet.plugins.packing import (
    Codes,
    Float16,
    LinearFormat,
    Quantized,
    dequantize,
    linear_reference,
    pack,
    quantize_activations,
    quantize_rtn,
    unpack,
)

FORMATS = [
    LinearFormat(bits, group_size, asymmetric)
    for bits, asymmetric in ((4, True), (4, False), (8, False))
    for group_size in (32, 64, 128)
]


def random_parts(rng: np.random.Generator, rows: int, in_features: int, format: LinearFormat) -> Quantized:
    codes: Codes
    if format.bits == 4:
        codes = rng.integers(0, 16, (rows, in_features), np.uint8)
    else:
        codes = rng.integers(-128, 128, (rows, in_features), np.int8)
    shape = (rows, in_features // format.group_size)
    scales: Float16 = rng.normal(0, 0.02, shape).astype(np.float16)
    return codes, scales, rng.normal(0, 0.1, shape).astype(np.float16) if format.asymmetric else None


def assert_same(parts: Quantized, others: Quantized) -> None:
    for part, other in zip(parts, others, strict=True):
        assert (part is None) == (other is None)
        if part is not None and other is not None:
            assert part.dtype == other.dtype
            np.testing.assert_array_equal(part, other)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 50), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack(format: LinearFormat, rows: int, groups: int, seed: int) -> None:
    in_features = groups * format.group_size
    parts = random_parts(np.random.default_rng(seed), rows, in_features, format)
    packed = pack(*parts, format)
    assert packed.nbytes == format.packed_bytes(in_features, rows)
    assert_same(unpack(packed, in_features, rows, format), parts)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 15))
def test_packing_in_chunks_gives_the_same_bytes(
    format: LinearFormat, tiles_per_chunk: list[int], missing: int
) -> None:
    rows = 16 * sum(tiles_per_chunk) - missing
    codes, scales, minimums = random_parts(np.random.default_rng(rows), rows, 2 * format.group_size, format)
    ends = 16 * np.cumsum(tiles_per_chunk)
    chunks = [
        pack(codes[a:b], scales[a:b], None if minimums is None else minimums[a:b], format)
        for a, b in zip([0, *ends[:-1]], ends, strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(chunks), pack(codes, scales, minimums, format))


def test_int4_layout_byte_by_byte() -> None:
    format = LinearFormat(4, 64, True)
    codes, scales, minimums = random_parts(np.random.default_rng(0), 32, 128, format)
    packed = pack(codes, scales, minimums, format)
    tile, group, block, chunk, column, j = 1, 1, 1, 3, 5, 2
    start = tile * format.bytes_per_tile(128) + group * format.bytes_per_group
    row, first = 16 * tile + column, 64 * group + 32 * block
    low, high = codes[row, first + 4 * chunk + j], codes[row, first + 16 + 4 * chunk + j]
    assert packed[start + 256 * block + 64 * chunk + 4 * column + j] == low | high << 4
    values = packed[start + 512 : start + 576].view("<f2")
    assert minimums is not None
    assert values[column] == scales[row, group]
    assert values[16 + column] == minimums[row, group]


def test_int8_layout_byte_by_byte() -> None:
    format = LinearFormat(8, 32, False)
    codes, scales, minimums = random_parts(np.random.default_rng(0), 20, 96, format)
    packed = pack(codes, scales, minimums, format)
    start = format.bytes_per_tile(96) + 2 * 544
    assert packed[start + 64 * 7 + 4 * 3 + 1].view(np.int8) == codes[19, 64 + 29]
    assert packed[start + 512 : start + 544].view("<f2")[3] == scales[19, 2]


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        (LinearFormat(4, 32, True), 5.0),
        (LinearFormat(4, 32, False), 4.5),
        (LinearFormat(4, 128, True), 4.25),
        (LinearFormat(8, 32, False), 8.5),
    ],
)
def test_bits_per_weight(format: LinearFormat, bits: float) -> None:
    assert format.bits_per_weight == bits
    assert format.packed_bytes(256, 64) == 256 * 64 * bits / 8


finite_weights = hnp.arrays(
    np.float32, (3, 128), elements=st.floats(-1000, 1000, width=32).map(lambda value: round(value, 3))
)


@settings(max_examples=60, deadline=None)
@given(finite_weights, st.sampled_from(FORMATS))
def test_rounding_error_is_half_a_step(weight: np.ndarray, format: LinearFormat) -> None:
    codes, scales, minimums = quantize_rtn(weight, format)
    error = np.abs(dequantize(codes, scales, minimums, format) - weight).reshape(3, -1, format.group_size)
    step = np.abs(scales[:, :, None].astype(np.float32))
    largest = np.abs(weight).reshape(error.shape).max(axis=2, keepdims=True)
    # Half a step inside the range. A value at its end may be clipped: by FP16's rounding of scale and minimum
    # (16 steps of 2^-11 and 2^-11 of the minimum, or 2^-25 below FP16's normals), and in the symmetric form
    # by a whole step on the side where only 7 codes are.
    clipped = (16 * step + largest) * 2.0**-10 + 130 * 2.0**-24
    assert np.all(error <= (1.0 if format.bits == 4 and not format.asymmetric else 0.5) * step + clipped)


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_returns_codes_that_are_on_the_grid(format: LinearFormat) -> None:
    rng = np.random.default_rng(3)
    codes, scales, minimums = random_parts(rng, 5, 256, format)
    low, high = (0, 15) if format.bits == 4 else (-127, 127)
    codes[codes < low] = low
    codes[:, :: format.group_size], codes[:, 1 :: format.group_size] = low, high
    scales = np.abs(scales) + np.float16(2**-6)
    weight = dequantize(codes, scales, minimums, format)
    found = quantize_rtn(weight, format)
    if minimums is None:
        np.testing.assert_array_equal(dequantize(*found, format), weight)
    else:
        # max - min is rounded, and so the scale may be off by a bit of FP16: far less than half a code.
        np.testing.assert_array_equal(found[0], codes)


def test_zero_and_constant_groups() -> None:
    for format in FORMATS:
        weight = np.zeros((2, 128), np.float32)
        np.testing.assert_array_equal(dequantize(*quantize_rtn(weight, format), format), weight)
    constant = np.full((1, 32), 0.75, np.float32)
    np.testing.assert_array_equal(dequantize(*quantize_rtn(constant, FORMATS[0]), FORMATS[0]), constant)


def test_symmetric_extreme_is_exact_on_either_side() -> None:
    format = LinearFormat(4, 32, False)
    weight = np.linspace(-0.5, 0.4, 32, dtype=np.float32)[None]
    for sign in (1, -1):
        codes, scales, _ = quantize_rtn(sign * weight, format)
        assert codes[0, 0] == 0
        assert scales[0, 0] == sign * 0.0625


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_damaged_weights_are_refused(format: LinearFormat, value: float) -> None:
    weight = np.ones((2, 128), np.float32)
    weight[1, 77] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_rtn(weight, format)


def test_weights_beyond_fp16_are_refused() -> None:
    weight = np.ones((1, 128), np.float32)
    weight[0, 3] = -1e30
    for format in FORMATS:
        with pytest.raises(ValueError, match="beyond FP16"):
            quantize_rtn(weight, format)


def test_wrong_parts_are_refused() -> None:
    format = LinearFormat(4, 32, True)
    codes, scales, minimums = random_parts(np.random.default_rng(0), 4, 64, format)
    assert minimums is not None
    infinite = np.full_like(scales, np.inf)
    wrong: list[tuple[tuple[Any, Any, Any], str]] = [
        ((codes.astype(np.int8), scales, minimums), "codes are int8"),
        ((codes[0], scales, minimums), "expected uint8"),
        ((codes[:0], scales[:0], minimums[:0]), "N > 0"),
        ((codes + np.uint8(1), scales, minimums), "codes go up to 16"),
        ((codes, scales, None), "minimums are missing"),
        ((codes, scales[:, :1], minimums), "scales are float16"),
        ((codes, scales, minimums.astype(np.float32)), "minimums are float32"),
        ((codes, infinite, minimums), "scales hold NaN"),
        ((codes[:, :48], scales, minimums), "multiple of group_size 32"),
    ]
    for parts, message in wrong:
        with pytest.raises(ValueError, match=message):
            pack(*parts, format)
    with pytest.raises(ValueError, match="expected uint8"):
        unpack(pack(codes, scales, minimums, format)[:-1], 64, 4, format)


@pytest.mark.parametrize("arguments", [(5, 32, False), (4, 48, False), (4, 16, True), (8, 32, True)])
def test_formats_that_do_not_exist(arguments: tuple[int, int, bool]) -> None:
    with pytest.raises(ValueError, match=r"bits|group_size|asymmetric"):
        LinearFormat(*arguments)


def test_reference_is_close_to_the_float_product() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(7, 256)).astype(np.float32)
    bias = rng.normal(size=33).astype(np.float32)
    for format in FORMATS:
        parts = random_parts(rng, 33, 256, format)
        a, a_scales = quantize_activations(x)
        rounded = a.astype(np.float64) * np.repeat(a_scales.astype(np.float64), 32, axis=1)
        exact = rounded @ dequantize(*parts, format).astype(np.float64).T + bias
        magnitude = np.abs(rounded) @ np.abs(dequantize(*parts, format)).T.astype(np.float64) + np.abs(bias)
        for fused in (True, False):
            y = linear_reference(x, *parts, format, bias, fused)
            # 8 blocks of at most 5 roundings of 2^-24; terms may be 8 times larger than what they cancel to.
            assert np.all(np.abs(y - exact) <= 8 * 8 * 5 * 2.0**-24 * magnitude)


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (2, 64), elements=st.floats(-(2.0**120), 2.0**120, width=32)))
def test_activation_codes_are_within_half_a_step(x: np.ndarray) -> None:
    codes, scales = quantize_activations(x)
    assert codes.min() >= -127
    steps = np.repeat(scales, 32, axis=1).astype(np.float64)
    # Half a step, the two roundings of 127/max and of the product with it (127 * 2^-23), or a block of zeros.
    assert np.all(np.abs(codes * steps - x) <= (0.5 + 127 * 2.0**-22) * steps + 2.0**-100)


def test_activations_that_are_not_finite_give_nan_rows() -> None:
    format = LinearFormat(4, 32, True)
    parts = random_parts(np.random.default_rng(0), 3, 64, format)
    x = np.ones((3, 64), np.float32)
    x[0, 5], x[2, 40] = np.nan, -np.inf
    y = linear_reference(x, *parts, format)
    np.testing.assert_array_equal(np.isnan(y), np.repeat([[True], [False], [True]], 3, axis=1))
