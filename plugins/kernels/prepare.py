# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The kernel before attention: norms and rotation of new heads, and their place in the paged cache."""

import triton
import triton.language as tl


@triton.jit
def prepare(
    query,
    key,
    value,
    key_cache,
    value_cache,
    key_scale_cache,
    value_scale_cache,
    cumulative_sequence_length,
    past_seqlens,
    block_table,
    position_ids,
    cos_cache,
    sin_cache,
    q_norm_weight,
    k_norm_weight,
    prepared_query,
    sequences,
    table_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    EPSILON: tl.constexpr,
    NORM_AFTER_ROTATION: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    CACHE: tl.constexpr,
):
    """One program per token and head, of a grid ``[T, HEADS]`` or, where it writes, with 2 KV_HEADS more.

    Queries go, in the activation's type, to ``prepared_query [T, HEADS, HEAD_DIM]``; keys and values to the
    cache, at the slots that the block table gives. What is not mapped there (-1) is not written.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    position = tl.load(position_ids + token) if ROTARY_DIM > 0 else token
    cos = cos_cache + position.to(tl.int64) * (ROTARY_DIM // 2)
    sin = sin_cache + position.to(tl.int64) * (ROTARY_DIM // 2)
    if head < HEADS:
        row = query + token.to(tl.int64) * QUERY_STRIDE + head * HEAD_DIM
        x = _normed_and_rotated(
            row,
            q_norm_weight,
            cos,
            sin,
            HEAD_DIM,
            BLOCK_D,
            ROTARY_DIM,
            INTERLEAVED,
            Q_NORM,
            EPSILON,
            NORM_AFTER_ROTATION,
        )
        target = prepared_query + (token.to(tl.int64) * HEADS + head) * HEAD_DIM
        tl.store(target + d, x.to(prepared_query.dtype.element_ty), mask=d < HEAD_DIM)
    else:
        s = _sequence_of(token, cumulative_sequence_length, sequences)
        logical = tl.load(past_seqlens + s) + token - tl.load(cumulative_sequence_length + s)
        in_table = logical < table_width * BLOCK_SIZE
        entry = block_table + s.to(tl.int64) * table_width + logical // BLOCK_SIZE
        block = tl.load(entry, mask=in_table, other=-1)
        if block >= 0:
            slot = block.to(tl.int64) * BLOCK_SIZE + logical % BLOCK_SIZE
            if head < HEADS + KV_HEADS:
                kv_head = head - HEADS
                x = _normed_and_rotated(
                    key + token.to(tl.int64) * KEY_STRIDE + kv_head * HEAD_DIM,
                    k_norm_weight,
                    cos,
                    sin,
                    HEAD_DIM,
                    BLOCK_D,
                    ROTARY_DIM,
                    INTERLEAVED,
                    K_NORM,
                    EPSILON,
                    NORM_AFTER_ROTATION,
                )
                _write(key_cache, key_scale_cache, slot * KV_HEADS + kv_head, x, HEAD_DIM, BLOCK_D, CACHE)
            else:
                kv_head = head - HEADS - KV_HEADS
                row = value + token.to(tl.int64) * KEY_STRIDE + kv_head * HEAD_DIM
                x = tl.load(row + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
                if NORM_VALUES:
                    x = x * _inverse_rms(x, HEAD_DIM, EPSILON)
                _write(value_cache, value_scale_cache, slot * KV_HEADS + kv_head, x, HEAD_DIM, BLOCK_D, CACHE)


@triton.jit
def _sequence_of(token, cumulative_sequence_length, sequences):
    """The sequence that has a row: the number of those that end at or before it."""
    before = 0
    for start in range(0, sequences, 32):
        s = start + tl.arange(0, 32)
        ends = tl.load(cumulative_sequence_length + 1 + s, mask=s < sequences, other=0x7FFFFFFF)
        before += tl.sum((ends <= token).to(tl.int32), axis=0)
    return before


@triton.jit
def _inverse_rms(x, HEAD_DIM: tl.constexpr, EPSILON: tl.constexpr):
    mean = tl.div_rn(tl.sum(x * x, axis=0), HEAD_DIM * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + EPSILON))


@triton.jit
def _normed_and_rotated(
    row,
    weight,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    EPSILON: tl.constexpr,
    NORM_AFTER_ROTATION: tl.constexpr,
):
    """A head ``[BLOCK_D]`` in float32. Rotation reads each element's partner again, which the cache has."""
    d = tl.arange(0, BLOCK_D)
    x = tl.load(row + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    if NORM:
        w = tl.load(weight + d, mask=d < HEAD_DIM, other=0.0)
        if not NORM_AFTER_ROTATION:
            inverse = _inverse_rms(x, HEAD_DIM, EPSILON)
            x = x * inverse * w
    if ROTARY_DIM > 0:
        rotated = d < ROTARY_DIM
        if INTERLEAVED:
            first = d % 2 == 0
            pair = d // 2
            partner = d ^ 1
        else:
            first = d < ROTARY_DIM // 2
            pair = tl.where(first, d, d - ROTARY_DIM // 2)
            partner = tl.where(first, d + ROTARY_DIM // 2, pair)
        other = tl.load(row + partner, mask=rotated, other=0.0).to(tl.float32)
        if NORM and not NORM_AFTER_ROTATION:
            other = other * inverse * tl.load(weight + partner, mask=rotated, other=0.0)
        c = tl.load(cos + pair, mask=rotated, other=0.0)
        s = tl.load(sin + pair, mask=rotated, other=0.0)
        x = tl.where(rotated, x * c + tl.where(first, -other, other) * s, x)
    if NORM and NORM_AFTER_ROTATION:
        x = x * _inverse_rms(x, HEAD_DIM, EPSILON) * w
    return x


@triton.jit
def _write(cache, scales, row, x, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CACHE: tl.constexpr):
    """A float32 head to row ``slot * KV_HEADS + head`` of the cache, and its scale."""
    d = tl.arange(0, BLOCK_D)
    target = cache + row * HEAD_DIM + d
    if CACHE == "f16":
        tl.store(target, x.to(tl.float16), mask=d < HEAD_DIM)
    else:
        largest: tl.constexpr = 127.0 if CACHE == "int8" else 448.0
        # As integers, magnitudes keep their order and NaN is the largest of all, so that none is lost.
        magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale = tl.div_rn(tl.max(magnitudes, axis=0).to(tl.float32, bitcast=True), largest)
        scale = tl.where(scale < float("inf"), scale, float("nan"))
        usable = scale > 0
        scaled = tl.where(usable, tl.div_rn(x, tl.where(usable, scale, 1.0)), 0.0)
        scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
        codes = round_to_int8(scaled) if CACHE == "int8" else encode_e4m3(scaled)
        tl.store(target, codes, mask=d < HEAD_DIM)
        tl.store(scales + row, scale)


@triton.jit
def round_to_int8(x):
    """Of float32 in [-127, 127], to the nearest, ties to even: 1.5 × 2**23 leaves no fraction."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def encode_e4m3(x):
    """The bits of the nearest E4M3FN, ties to even, of float32 in [-448, 448].

    In integers, since GPUs before SM 89 have no instruction for it. A normal number loses 20 bits of its
    mantissa, and its exponent's bias falls from 127 to 7. Below 2**-6 steps are 2**-9: the distance of
    float32 numbers at 2**14, where the sum is rounded by the addition.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000  # the bits of 16384.0
    codes = tl.where(magnitude < 0x3C800000, small, normal)  # the bits of 2**-6
    return (codes | ((bits >> 24) & 0x80)).to(tl.uint8)
