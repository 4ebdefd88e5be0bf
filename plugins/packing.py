"""Packed weights of the CPU target's `Linear` and `Embedding` ops, in NumPy.

A weight [N, K] is quantized in groups of consecutive inputs of one output column. In a group

* INT4 asymmetric: `w = scale * q + minimum`, q in 0..15 (groups of 32 are exactly GGUF's Q4_1);
* INT4 symmetric: `w = scale * (q - 8)`, q in 0..15 (groups of 32 are exactly Q4_0);
* INT8: `w = scale * q`, q in -127..127 (groups of 32 are exactly Q8_0; a -128 from elsewhere is legal).

The packed form is a sequence of tiles of 16 columns (N is padded with zeros), the same for every instruction
set, so that a file can be mapped and used as it is. A tile is a sequence of groups, and a group is

* for each 32 inputs, INT4: 256 bytes, four chunks of 64; in chunk i, byte 4c+j holds for column c the codes
  q[4i+j] (low nibble) and q[16+4i+j] (high nibble). INT8: 512 bytes, eight chunks; byte 4c+j holds q[4i+j];
* the FP16 scales of the 16 columns, then, if asymmetric, their FP16 minimums.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Codes = npt.NDArray[np.uint8] | npt.NDArray[np.int8]
Float16 = npt.NDArray[np.float16]
Float32 = npt.NDArray[np.float32]
Quantized = tuple[Codes, Float16, Float16 | None]

TILE_COLUMNS = 16
BLOCK_INPUTS = 32
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class LinearFormat:
    """How a weight is quantized: 4 or 8 bits, inputs per group, and whether groups have a real minimum."""

    bits: int = 4
    group_size: int = 32
    asymmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}, expected 4 or 8")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size is {self.group_size}, expected one of {GROUP_SIZES}")
        if self.bits == 8 and self.asymmetric:
            raise ValueError("8-bit weights are symmetric: set asymmetric=False")

    @property
    def weight_type(self) -> str:
        """The ops' attribute of that name."""
        return f"int{self.bits}"

    @property
    def zero_point(self) -> int:
        """The code that stands for zero, where a group has no minimum of its own."""
        return 8 if self.bits == 4 and not self.asymmetric else 0

    @property
    def bytes_per_group(self) -> int:
        """Bytes of one group of one tile: codes, FP16 scales and minimums."""
        codes = TILE_COLUMNS * self.group_size * self.bits // 8
        return codes + 2 * TILE_COLUMNS * (2 if self.asymmetric else 1)

    @property
    def bits_per_weight(self) -> float:
        """Storage per weight with its share of scales and minimums; padding is not counted."""
        return 8 * self.bytes_per_group / (TILE_COLUMNS * self.group_size)

    def groups(self, in_features: int) -> int:
        """Groups along the inputs; ValueError if `in_features` is not a positive multiple of the group."""
        if in_features <= 0 or in_features % self.group_size:
            raise ValueError(
                f"in_features is {in_features}, expected a positive multiple of group_size "
                f"{self.group_size}: choose a smaller group or keep this weight unquantized"
            )
        return in_features // self.group_size

    def bytes_per_tile(self, in_features: int) -> int:
        """Bytes of 16 output columns."""
        return self.groups(in_features) * self.bytes_per_group

    def packed_bytes(self, in_features: int, out_features: int) -> int:
        """Bytes of the whole packed weight [out_features, in_features]."""
        if out_features <= 0:
            raise ValueError(f"out_features is {out_features}, expected a positive number")
        return -(-out_features // TILE_COLUMNS) * self.bytes_per_tile(in_features)


def pack(
    codes: Codes, scales: Float16, minimums: Float16 | None, format: LinearFormat
) -> npt.NDArray[np.uint8]:
    """Pack codes uint8 or int8 [N, K], scales and minimums f16 [N, K/group_size], into bytes [packed_bytes].

    Rows n0..n1 with n0 a multiple of 16 give exactly their tiles of the whole weight's bytes, so a large
    weight can be packed in chunks. Raises ValueError for shapes, dtypes or values that the format can't hold.
    """
    _check_parts(codes, scales, minimums, format)
    rows, in_features = codes.shape
    groups = format.groups(in_features)
    padding = ((0, -rows % TILE_COLUMNS), (0, 0))
    parts = [_pack_codes(np.pad(codes, padding), groups, format)]
    for values in (scales, minimums):
        if values is not None:
            per_group = np.pad(values, padding).reshape(-1, TILE_COLUMNS, groups).transpose(0, 2, 1)
            parts.append(np.ascontiguousarray(per_group, "<f2").view(np.uint8))
    return np.concatenate(parts, axis=2).reshape(-1)


def _pack_codes(codes: Array, groups: int, format: LinearFormat) -> npt.NDArray[np.uint8]:
    """Codes [16·tiles, K] to bytes [tiles, groups, bytes]."""
    tiles = len(codes) // TILE_COLUMNS
    blocks = format.group_size // BLOCK_INPUTS
    data: npt.NDArray[np.uint8] = codes.view(np.uint8)
    if format.bits == 4:
        halves = data.reshape(len(data), -1, 2, BLOCK_INPUTS // 2)
        data = halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4))
    chunks = data.reshape(tiles, TILE_COLUMNS, groups, blocks, -1, 4)
    packed: npt.NDArray[np.uint8] = chunks.transpose(0, 2, 3, 4, 1, 5).reshape(tiles, groups, -1)
    return packed


def unpack(
    packed: npt.NDArray[np.uint8], in_features: int, out_features: int, format: LinearFormat
) -> Quantized:
    """The inverse of `pack`: codes [N, K], scales and minimums f16 [N, K/group_size]."""
    expected = format.packed_bytes(in_features, out_features)
    if packed.dtype != np.uint8 or packed.shape != (expected,):
        raise ValueError(f"packed weight is {packed.dtype} {packed.shape}, expected uint8 ({expected},)")
    groups = format.groups(in_features)
    by_group = packed.reshape(-1, groups, format.bytes_per_group)
    end = TILE_COLUMNS * format.group_size * format.bits // 8
    codes = _unpack_codes(by_group[:, :, :end], format)[:out_features]
    values = [
        np.ascontiguousarray(by_group[:, :, start : start + 2 * TILE_COLUMNS])
        .view("<f2")
        .transpose(0, 2, 1)
        .reshape(-1, groups)[:out_features]
        for start in range(end, format.bytes_per_group, 2 * TILE_COLUMNS)
    ]
    return codes, values[0], values[1] if format.asymmetric else None


def _unpack_codes(data: npt.NDArray[np.uint8], format: LinearFormat) -> Codes:
    """Bytes [tiles, groups, bytes] to codes [16·tiles, K]."""
    tiles, groups, _ = data.shape
    blocks = format.group_size // BLOCK_INPUTS
    chunks = data.reshape(tiles, groups, blocks, -1, TILE_COLUMNS, 4).transpose(0, 4, 1, 2, 3, 5)
    rows = np.ascontiguousarray(chunks).reshape(tiles * TILE_COLUMNS, groups * blocks, -1)
    if format.bits == 8:
        return rows.reshape(len(rows), -1).view(np.int8)
    return np.concatenate([rows & 15, rows >> 4], axis=2).reshape(len(rows), -1)


def _check_parts(codes: Array, scales: Array, minimums: Array | None, format: LinearFormat) -> None:
    code_type = np.dtype(np.uint8 if format.bits == 4 else np.int8)
    if codes.ndim != 2 or codes.dtype != code_type or len(codes) == 0:
        raise ValueError(f"codes are {codes.dtype} {codes.shape}, expected {code_type} [N, K] with N > 0")
    if format.bits == 4 and codes.size and codes.max() > 15:
        raise ValueError(f"codes go up to {codes.max()}, expected 0..15")
    if (minimums is not None) != format.asymmetric:
        raise ValueError(f"minimums are {'given' if minimums is not None else 'missing'} for {format}")
    shape = (len(codes), format.groups(codes.shape[1]))
    for name, values in (("scales", scales), ("minimums", minimums)):
        if values is None:
            continue
        if values.shape != shape or values.dtype != np.float16:
            raise ValueError(f"{name} are {values.dtype} {values.shape}, expected float16 {shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"{name} hold NaN or infinity, expected finite FP16 values")


def quantize_rtn(weight: Float32, format: LinearFormat) -> Quantized:
    """Round weight f32 [N, K] to the nearest codes: (codes, scales f16, minimums f16 or None).

    Scales and minimums are rounded to FP16 before the codes are computed, so the codes absorb that error.
    Raises ValueError for a K that is not a multiple of the group, for NaN, infinity, and values beyond FP16.
    """
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {weight.shape}, expected [N, K]")
    groups = format.groups(weight.shape[1])
    values = weight.astype(np.float32, copy=False).reshape(len(weight), groups, format.group_size)
    if not np.isfinite(values).all():
        raise ValueError("weight holds NaN or infinity, expected finite values: the checkpoint is damaged")
    minimums = None
    if format.asymmetric:
        lowest = values.min(axis=2)
        minimums = _to_float16(lowest)  # and so the difference below stays finite
        scales = _to_float16((values.max(axis=2) - lowest) / np.float32(15))
        codes = np.clip(_divide(values - minimums[:, :, None].astype(np.float32), scales), 0, 15)
    elif format.bits == 4:
        # The value farthest from zero gets code 0, which is -8: that end of the range reaches farther.
        farthest = np.abs(values).argmax(axis=2, keepdims=True)
        scales = _to_float16(np.take_along_axis(values, farthest, axis=2)[:, :, 0] / np.float32(-8))
        codes = np.clip(_divide(values, scales), -8, 7) + 8
    else:
        scales = _to_float16(np.abs(values).max(axis=2) / np.float32(127))
        codes = np.clip(_divide(values, scales), -127, 127)
    code_type = np.uint8 if format.bits == 4 else np.int8
    return codes.astype(code_type).reshape(weight.shape), scales, minimums


def _to_float16(values: Float32) -> Float16:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ValueError(
            f"a group needs a scale or minimum of {np.abs(values).max():g}, beyond FP16's 65504: "
            "rescale this weight or keep it unquantized"
        )
    return rounded


def _divide(values: Float32, scales: Float16) -> Float32:
    """values [N, G, g] / scales [N, G], rounded half to even; 0 where the scale is 0."""
    divisor = np.broadcast_to(scales[:, :, None].astype(np.float32), values.shape)
    return np.rint(np.divide(values, divisor, out=np.zeros_like(values), where=divisor != 0))


def dequantize(codes: Codes, scales: Float16, minimums: Float16 | None, format: LinearFormat) -> Float32:
    """The weight f32 [N, K] that the codes stand for; bitwise what `Embedding` returns."""
    _check_parts(codes, scales, minimums, format)
    weight: Float32 = codes.astype(np.float32) - np.float32(format.zero_point)
    weight *= np.repeat(scales.astype(np.float32), format.group_size, axis=1)
    if minimums is not None:
        weight += np.repeat(minimums.astype(np.float32), format.group_size, axis=1)
    return weight


def quantize_activations(x: Float32) -> tuple[npt.NDArray[np.int8], Float32]:
    """Activations f32 [T, K] to codes int8 [T, K] and scales f32 [T, K/32], each block of 32 by itself.

    A block's scale is max|x| / 127. A block below 2^-100 counts as zero; NaN or infinity give a NaN scale.
    """
    blocks = x.reshape(len(x), -1, BLOCK_INPUTS)
    largest = np.abs(blocks).max(axis=2)
    regular = np.isfinite(largest) & (largest >= np.float32(2.0**-100))
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=regular)
    scaled = np.where(regular[:, :, None], blocks, 0) * inverse[:, :, None]
    scales = np.where(regular, largest / np.float32(127), np.where(np.isfinite(largest), 0, np.nan))
    return np.rint(scaled).astype(np.int8).reshape(x.shape), scales.astype(np.float32)


def linear_reference(
    x: Float32,
    codes: Codes,
    scales: Float16,
    minimums: Float16 | None,
    format: LinearFormat,
    bias: Float32 | None = None,
    fused: bool = True,
) -> Float32:
    """`Linear` in NumPy, to the bit: x f32 [T, K] times the weight's transpose, f32 [T, N].

    Integer dot products per block of 32 inputs are added to the bias in ascending order with a fused
    multiply-add, as AVX2, AVX-512 and NEON do; `fused=False` rounds the product first, as portable code does.
    """
    _check_parts(codes, scales, minimums, format)
    multiply_add = fused_multiply_add if fused else plain_multiply_add
    a, a_scales = quantize_activations(x)
    q = codes.astype(np.int64) - format.zero_point
    y = np.zeros((len(x), len(codes)), np.float32) if bias is None else np.tile(bias, (len(x), 1))
    for block in range(x.shape[1] // BLOCK_INPUTS):
        inputs = slice(block * BLOCK_INPUTS, (block + 1) * BLOCK_INPUTS)
        group = inputs.start // format.group_size
        a_block, a_scale = a[:, inputs].astype(np.int64), a_scales[:, block, None]
        dots = (a_block @ q[:, inputs].T).astype(np.float32)
        y = multiply_add(dots, scales[:, group].astype(np.float32) * a_scale, y)
        if minimums is not None:
            sums = a_block.sum(axis=1, keepdims=True).astype(np.float32)
            y = multiply_add(minimums[:, group].astype(np.float32), a_scale * sums, y)
    return y


def rms_norm_reference(x: Float32, weight: Float32, epsilon: float, fused: bool = True) -> Float32:
    """RMSNorm as `Linear` computes it, to the bit: x f32 [T, K] / sqrt(mean(x²) + epsilon) · weight [K].

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. Lane l of 16 sums the squares of
    elements l, l + 16, …; then lane l is added to lane l + 8, l + 4, l + 2, l + 1.
    """
    multiply_add = fused_multiply_add if fused else plain_multiply_add
    rows, size = x.shape
    padded = np.pad(x, ((0, 0), (0, -size % 16))).reshape(rows, -1, 16)
    sums = np.zeros((rows, 16), np.float32)
    for step in range(padded.shape[1]):
        sums = multiply_add(padded[:, step], padded[:, step], sums)
    for half in (8, 4, 2, 1):
        sums = sums[:, :half] + sums[:, half : 2 * half]
    inverse = np.float32(1) / np.sqrt(sums / np.float32(size) + np.float32(epsilon))
    normed: Float32 = x * inverse * weight
    return normed


def plain_multiply_add(a: Float32, b: Float32, c: Float32) -> Float32:
    """a·b + c with two roundings."""
    return a * b + c


def fused_multiply_add(a: Float32, b: Float32, c: Float32) -> Float32:
    """a·b + c with one rounding: float64 holds the product, and the sum is rounded to odd before float32.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
    odd", IEEE Transactions on Computers 57, 2008.
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact_even = (error != 0) & (total.view(np.int64) & 1 == 0)
    odd = np.where(inexact_even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return odd.astype(np.float32)
