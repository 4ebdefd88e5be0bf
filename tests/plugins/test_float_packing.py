"""The packed layout of weights that are floats, the roundings to them, and the reference of the sum."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pagelet.plugins.float_packing import (
    E4M3_VALUES,
    FloatFormat,
    FloatParts,
    dequantize,
    float_linear_reference,
    pack,
    quantize,
    to_bf16,
    to_e4m3,
    unpack,
)

Float32 = npt.NDArray[np.float32]

FORMATS = [
    *(FloatFormat(type) for type in ("f32", "f16", "bf16")),
    *(FloatFormat("fp8", group_size) for group_size in (0, 32, 64, 128)),
]


def random_parts(rows: int, in_features: int, format: FloatFormat, seed: int = 0) -> FloatParts:
    rng = np.random.default_rng(seed)
    return quantize(rng.normal(size=(rows, in_features)).astype(np.float32), format)


def assert_same(found: FloatParts, expected: FloatParts) -> None:
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None
        else:
            np.testing.assert_array_equal(a, b, strict=True)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_unpack_is_the_inverse_of_pack(format: FloatFormat, rows: int, groups: int, seed: int) -> None:
    in_features = groups * (format.group_size or 13)
    parts = random_parts(rows, in_features, format, seed)
    packed = pack(*parts, format)
    assert packed.nbytes == format.packed_bytes(in_features, rows)
    assert_same(unpack(packed, in_features, rows, format), parts)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 15))
def test_packing_in_chunks_gives_the_same_bytes(
    format: FloatFormat, tiles_per_chunk: list[int], missing: int
) -> None:
    rows = 16 * sum(tiles_per_chunk) - missing
    values, scales = random_parts(rows, format.group_size or 21, format)
    ends = 16 * np.cumsum(tiles_per_chunk)
    chunks = [
        pack(values[a:b], None if scales is None else scales[a:b], format)
        for a, b in zip([0, *ends[:-1]], ends, strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(chunks), pack(values, scales, format))


def test_plain_layout_byte_by_byte() -> None:
    values, _ = random_parts(33, 7, FloatFormat("f16"))
    packed = pack(values, None, FloatFormat("f16"))
    tile, k, column = 1, 5, 11
    assert packed.view("<f2")[tile * 7 * 16 + k * 16 + column] == values[16 * tile + column, k]
    assert not packed.view("<f2")[2 * 7 * 16 :].reshape(7, 16)[:, 1:].any()


def test_fp8_layout_byte_by_byte() -> None:
    format = FloatFormat("fp8", 32)
    values, scales = random_parts(20, 96, format)
    assert scales is not None
    packed = pack(values, scales, format)
    tile, group, k, column = 1, 2, 17, 3
    start = tile * format.bytes_per_tile(96) + group * (32 * 16 + 64)
    assert packed[start + 16 * k + column] == values[16 * tile + column, 32 * group + k]
    assert packed[start + 512 : start + 576].view("<f4")[column] == scales[16 * tile + column, group]


def test_e4m3_values_are_those_of_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(E4M3_VALUES, expected)


def test_rounding_to_e4m3_is_that_of_ml_dtypes() -> None:
    """Every number, every tie, their neighbours, and random ones; beyond 448 ours saturates."""
    numbers = np.unique(np.abs(E4M3_VALUES[np.isfinite(E4M3_VALUES)]))
    edges = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    near = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(448))])
    rng = np.random.default_rng(0)
    spread = rng.normal(size=100_000) * 2.0 ** rng.integers(-20, 8, 100_000)
    x = np.concatenate([near, np.clip(spread, -448, 448)]).astype(np.float32)
    for signed in (x, -x):
        expected = signed.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(to_e4m3(signed), expected)
    assert to_e4m3(np.float32([449, 1e30, -500])).tolist() == [0x7E, 0x7E, 0xFE]


def test_rounding_to_bf16_is_that_of_ml_dtypes() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 500_000, np.uint32)
    ties = np.arange(2**16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)
    x = np.concatenate([bits, ties]).view(np.float32)
    x = x[np.isfinite(x)]
    with np.errstate(over="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(to_bf16(x), expected)


finite_weights = hnp.arrays(np.float32, (3, 128), elements=st.floats(-1000, 1000, width=32))


@settings(max_examples=60, deadline=None)
@given(finite_weights, st.sampled_from(FORMATS))
def test_rounding_error_is_half_a_step(weight: Float32, format: FloatFormat) -> None:
    error = np.abs(dequantize(*quantize(weight, format), format) - weight)
    bits = {"fp8": 3, "bf16": 7, "f16": 10, "f32": 23}[format.type]
    groups = np.abs(weight).reshape(3, format.groups(128), -1)
    # Half of the last bit, and half of the smallest subnormal: of FP8 2^-10 times the scale. Its quotient,
    # scale and product are rounded too.
    scale = np.repeat(groups.max(axis=2) / 448, groups.shape[2], axis=1) if bits == 3 else 0
    smallest = {"fp8": 2.0**-10 * scale, "f16": 2.0**-25}.get(format.type, 0)
    assert np.all(error <= np.abs(weight) * (2.0 ** -(bits + 1) + (bits == 3) * 2.0**-22) + smallest + 2e-45)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_on_the_grid_stays(format: FloatFormat) -> None:
    parts = random_parts(5, 256, format)
    weight = dequantize(*parts, format)
    np.testing.assert_array_equal(dequantize(*quantize(weight, format), format), weight)


def test_zero_groups() -> None:
    weight = np.zeros((2, 128), np.float32)
    for format in FORMATS:
        np.testing.assert_array_equal(dequantize(*quantize(weight, format), format), weight)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_damaged_weights_are_refused(format: FloatFormat, value: float) -> None:
    weight = np.ones((2, 128), np.float32)
    weight[1, 77] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(weight, format)


def test_weights_beyond_a_format_are_refused() -> None:
    largest = np.finfo(np.float32).max
    for format, value in ((FloatFormat("f16"), 65520.0), (FloatFormat("bf16"), largest)):
        weight = np.ones((1, 128), np.float32)
        weight[0, 3] = value
        with pytest.raises(ValueError, match=f"beyond {format.type}"):
            quantize(weight, format)
    for format in (FloatFormat("f32"), *FORMATS[3:]):
        assert np.isfinite(dequantize(*quantize(np.full((1, 128), largest), format), format)).all()


def test_wrong_parts_are_refused() -> None:
    format = FloatFormat("fp8", 32)
    values, scales = random_parts(4, 64, format)
    assert scales is not None
    not_a_number = values.copy()
    not_a_number[1, 1] = 0xFF
    wrong: list[tuple[tuple[Any, Any], str]] = [
        ((values.astype(np.int8), scales), "values are int8"),
        ((values[0], scales), "expected uint8"),
        ((values[:0], scales[:0]), "N > 0"),
        ((values, None), "scales are missing"),
        ((values, scales[:, :1]), "scales are float32"),
        ((values, scales.astype(np.float16)), "scales are float16"),
        ((values, np.full_like(scales, np.inf)), "hold NaN"),
        ((not_a_number, scales), "hold NaN"),
        ((values[:, :48], scales), "multiple of group_size 32"),
    ]
    for parts, message in wrong:
        with pytest.raises(ValueError, match=message):
            pack(*parts, format)
    with pytest.raises(ValueError, match="scales are given"):
        pack(np.zeros((1, 4), np.float32), scales, FloatFormat("f32"))
    with pytest.raises(ValueError, match="expected uint8"):
        unpack(pack(values, scales, format)[:-1], 64, 4, format)


@pytest.mark.parametrize("arguments", [("f64", 0), ("fp8", 48), ("f32", 32)])
def test_formats_that_do_not_exist(arguments: tuple[str, int]) -> None:
    with pytest.raises(ValueError, match=r"type is|group_size"):
        FloatFormat(*arguments)


def test_reference_is_close_to_the_float_product() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(7, 256)).astype(np.float32)
    bias = rng.normal(size=33).astype(np.float32)
    for format in FORMATS:
        parts = random_parts(33, 256, format)
        weight = dequantize(*parts, format).astype(np.float64)
        magnitude = np.abs(x) @ np.abs(weight).T + np.abs(bias)
        for fused in (True, False):
            y = float_linear_reference(x, *parts, format, bias, fused)
            # At most 2 roundings of 2^-24 for each of 256 products, some more for the groups' totals.
            assert np.all(np.abs(y - (x @ weight.T + bias)) <= 2 * 272 * 2.0**-24 * magnitude)
