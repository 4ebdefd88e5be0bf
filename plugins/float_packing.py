"""Packed weights that are floats, plain or FP8, of the CPU target's `Linear` and `Embedding` ops, in NumPy.

A weight [N, K] is held as one of

* `f32`, `f16`, `bf16`: the numbers themselves, bfloat16 as its bits in uint16;
* `fp8`: `w = scale * code`, codes E4M3 ("FN": no infinities, largest 448), FP32 scales for each output
  column, or for each group of 32, 64 or 128 consecutive inputs of one.

The packed form is a sequence of tiles of 16 columns (N is padded with zeros), the same for every instruction
set, so that a file can be mapped and used as it is. A tile is [K][16] numbers; of FP8, a sequence of groups,
each [group][16] codes of a byte and then the 16 scales.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagelet.plugins.packing import (
    GROUP_SIZES,
    TILE_COLUMNS,
    Array,
    Float32,
    fused_multiply_add,
    plain_multiply_add,
)

UInt8 = npt.NDArray[np.uint8]
Values = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.float16] | Float32
FloatParts = tuple[Values, Float32 | None]

FLOAT_TYPES = ("fp8", "bf16", "f16", "f32")
LARGEST_FP8 = 448
_DTYPES: dict[str, type[np.generic]] = {
    "fp8": np.uint8,
    "bf16": np.uint16,
    "f16": np.float16,
    "f32": np.float32,
}


@dataclass(frozen=True)
class FloatFormat:
    """How a weight is stored: `type` of FLOAT_TYPES, and for FP8 the inputs per scale, 0 for all of them."""

    type: str
    group_size: int = 0

    def __post_init__(self) -> None:
        if self.type not in FLOAT_TYPES:
            raise ValueError(f"type is {self.type!r}, expected one of {FLOAT_TYPES}")
        sizes = (0, *GROUP_SIZES) if self.type == "fp8" else (0,)
        if self.group_size not in sizes:
            raise ValueError(f"group_size is {self.group_size}, expected one of {sizes} for {self.type}")

    @property
    def weight_type(self) -> str:
        """The ops' attribute of that name."""
        return self.type

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Of the values in NumPy, which has no FP8 and no bfloat16: their bits."""
        return np.dtype(_DTYPES[self.type])

    def groups(self, in_features: int) -> int:
        """Groups along the inputs; ValueError if they do not divide `in_features`."""
        if in_features <= 0 or (self.group_size and in_features % self.group_size):
            raise ValueError(
                f"in_features is {in_features}, expected a positive multiple of group_size "
                f"{self.group_size or 1}: choose a smaller group, or 0 for one scale per output"
            )
        return in_features // self.group_size if self.group_size else 1

    def bytes_per_tile(self, in_features: int) -> int:
        """Bytes of 16 output columns."""
        scales = 4 * self.groups(in_features) if self.type == "fp8" else 0
        return TILE_COLUMNS * (in_features * self.dtype.itemsize + scales)

    def packed_bytes(self, in_features: int, out_features: int) -> int:
        """Bytes of the whole packed weight [out_features, in_features]."""
        if out_features <= 0:
            raise ValueError(f"out_features is {out_features}, expected a positive number")
        return -(-out_features // TILE_COLUMNS) * self.bytes_per_tile(in_features)


def pack(values: Values, scales: Float32 | None, format: FloatFormat) -> UInt8:
    """Pack values [N, K] of the format's dtype, and FP8's scales f32 [N, groups], into bytes [packed_bytes].

    Rows n0..n1 with n0 a multiple of 16 give exactly their tiles of the whole weight's bytes, so a large
    weight can be packed in chunks. Raises ValueError for shapes, dtypes or values that the format can't hold.
    """
    _check_parts(values, scales, format)
    padding = ((0, -len(values) % TILE_COLUMNS), (0, 0))
    groups = format.groups(values.shape[1])
    parts = [_by_tile(np.pad(values, padding), groups)]
    if scales is not None:
        parts.append(_by_tile(np.pad(scales, padding), groups))
    return np.concatenate(parts, axis=2).reshape(-1)


def _by_tile(rows: Array, groups: int) -> UInt8:
    """Numbers [16·tiles, groups·n] to bytes [tiles, groups, bytes of n times 16 columns]."""
    tiles = rows.reshape(-1, TILE_COLUMNS, rows.shape[1]).transpose(0, 2, 1)
    little_endian = np.ascontiguousarray(tiles, rows.dtype.newbyteorder("<"))
    data: UInt8 = little_endian.reshape(-1).view(np.uint8).reshape(len(tiles), groups, -1)
    return data


def unpack(packed: UInt8, in_features: int, out_features: int, format: FloatFormat) -> FloatParts:
    """The inverse of `pack`: values [N, K], and FP8's scales f32 [N, groups]."""
    expected = format.packed_bytes(in_features, out_features)
    if packed.dtype != np.uint8 or packed.shape != (expected,):
        raise ValueError(f"packed weight is {packed.dtype} {packed.shape}, expected uint8 ({expected},)")
    groups = format.groups(in_features)
    by_group = packed.reshape(expected // format.bytes_per_tile(in_features), groups, -1)
    end = TILE_COLUMNS * in_features // groups * format.dtype.itemsize
    values = _by_row(by_group[:, :, :end], format.dtype)[:out_features]
    if format.type != "fp8":
        return values, None  # type: ignore[return-value]
    return values, _by_row(by_group[:, :, end:], np.dtype(np.float32))[:out_features]  # type: ignore[return-value]


def _by_row(data: UInt8, dtype: np.dtype[np.generic]) -> Array:
    """The inverse of `_by_tile`."""
    numbers = np.ascontiguousarray(data).reshape(-1).view(dtype.newbyteorder("<")).astype(dtype, copy=False)
    rows: Array = numbers.reshape(len(data), -1, TILE_COLUMNS).transpose(0, 2, 1)
    return rows.reshape(len(data) * TILE_COLUMNS, -1)


def _check_parts(values: Array, scales: Array | None, format: FloatFormat) -> None:
    if values.ndim != 2 or values.dtype != format.dtype or len(values) == 0:
        raise ValueError(
            f"values are {values.dtype} {values.shape}, expected {format.dtype} [N, K] with N > 0"
        )
    if (scales is not None) != (format.type == "fp8"):
        raise ValueError(f"scales are {'given' if scales is not None else 'missing'} for {format}")
    shape = (len(values), format.groups(values.shape[1]))
    if scales is None:
        return
    if scales.shape != shape or scales.dtype != np.float32:
        raise ValueError(f"scales are {scales.dtype} {scales.shape}, expected float32 {shape}")
    if not np.isfinite(scales).all() or np.any(values & np.uint8(0x7F) == 0x7F):
        raise ValueError("codes or scales hold NaN or infinity, expected finite values")


def quantize(weight: Float32, format: FloatFormat) -> FloatParts:
    """Round weight f32 [N, K] to the nearest numbers of the format: (values, FP8's scales or None).

    Raises ValueError for NaN, infinity, values beyond the format, and a K that the groups do not divide.
    """
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {weight.shape}, expected [N, K]")
    if not np.isfinite(weight).all():
        raise ValueError("weight holds NaN or infinity, expected finite values: the checkpoint is damaged")
    if format.type == "fp8":
        return quantize_fp8(weight, format)
    with np.errstate(over="ignore"):
        values = to_bf16(weight) if format.type == "bf16" else weight.astype(format.dtype)
    if not np.isfinite(to_float32(values, format)).all():
        raise ValueError(
            f"weight goes up to {np.abs(weight).max():g}, beyond {format.type}: store it as bf16 or f32"
        )
    return values, None


def quantize_fp8(
    weight: Float32, format: FloatFormat, scales: Float32 | None = None
) -> tuple[UInt8, Float32]:
    """E4M3 codes uint8 [N, K] and scales f32 [N, groups]: those given, or max |w| / 448 of each group."""
    groups = format.groups(weight.shape[1])
    grouped = weight.reshape(len(weight), groups, -1)
    if scales is None:
        scales = np.abs(grouped).max(axis=2) / np.float32(LARGEST_FP8)
    divisor = np.broadcast_to(scales[:, :, None], grouped.shape)
    scaled = np.divide(grouped, divisor, out=np.zeros_like(grouped), where=divisor != 0)
    return to_e4m3(scaled).reshape(weight.shape), scales


def to_e4m3(x: Float32) -> UInt8:
    """The E4M3 code of the nearest number, ties to even; beyond 448 that of 448. No NaN.

    Micikevicius et al., "FP8 formats for deep learning", 2022: bias 7, 3 bits of mantissa, NaN only 0x7f.
    """
    exponents = np.maximum(np.frexp(x)[1] - 1, -6)  # below 2^-6, the steps are those of 2^-6
    eighths = np.minimum(np.rint(np.ldexp(np.abs(x), 3 - exponents)), 16)  # of 2^exponent
    codes = np.where(eighths < 8, eighths, eighths + 8 * (exponents + 6))
    signs = np.where(np.signbit(x), 0x80, 0).astype(np.uint8)
    signed: UInt8 = signs | np.minimum(codes, 0x7E).astype(np.uint8)
    return signed


def to_bf16(x: Float32) -> npt.NDArray[np.uint16]:
    """The upper halves of the nearest floats with 8 bits of mantissa, ties to even. No NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    upper: npt.NDArray[np.uint16] = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return upper


def _e4m3_table() -> Float32:
    """The value of each code."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7).astype(np.float32)
    magnitude = np.ldexp(np.where(exponent > 0, mantissa + 8, mantissa), np.maximum(exponent, 1) - 10)
    magnitude[code & 0x7F == 0x7F] = np.nan
    values: Float32 = np.where(code < 0x80, magnitude, -magnitude).astype(np.float32)
    return values


E4M3_VALUES = _e4m3_table()


def to_float32(values: Array, format: FloatFormat) -> Float32:
    """The values of the format's dtype as floats, exactly; FP8 codes without their scales."""
    if format.type == "fp8":
        floats: Float32 = E4M3_VALUES[values]
    elif format.type == "bf16":
        floats = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        floats = values.astype(np.float32)
    return floats


def dequantize(values: Values, scales: Float32 | None, format: FloatFormat) -> Float32:
    """The weight f32 [N, K] that the values stand for; bitwise what `Embedding` returns."""
    _check_parts(values, scales, format)
    weight = to_float32(values, format)
    if scales is not None:
        weight *= np.repeat(scales, weight.shape[1] // scales.shape[1], axis=1)
    return weight


def float_linear_reference(
    x: Float32,
    values: Values,
    scales: Float32 | None,
    format: FloatFormat,
    bias: Float32 | None = None,
    fused: bool = True,
) -> Float32:
    """`Linear` with such a weight in NumPy, to the bit: x f32 [T, K] times its transpose, f32 [T, N].

    Products are added to the bias in ascending order of the inputs with a fused multiply-add; FP8's are added
    up from zero for each group, and the total times the scale is added. There a code counts as a 256th of its
    value and a scale 256-fold, as FP16's exponents give it. `fused=False` rounds the product first, as
    portable code does.
    """
    _check_parts(values, scales, format)
    multiply_add = fused_multiply_add if fused else plain_multiply_add
    y = np.zeros((len(x), len(values)), np.float32) if bias is None else np.tile(bias, (len(x), 1))
    weight = to_float32(values, format)
    if scales is None:
        return _add_products(y, x, weight, fused)
    size = weight.shape[1] // scales.shape[1]
    for group in range(scales.shape[1]):
        inputs = slice(group * size, (group + 1) * size)
        total = _add_products(np.zeros_like(y), x[:, inputs], weight[:, inputs] / np.float32(256), fused)
        y = multiply_add(total, scales[None, :, group] * np.float32(256), y)
    return y


def _add_products(y: Float32, x: Float32, weight: Float32, fused: bool) -> Float32:
    multiply_add = fused_multiply_add if fused else plain_multiply_add
    for k in range(x.shape[1]):
        y = multiply_add(x[:, k, None], weight[None, :, k], y)
    return y
