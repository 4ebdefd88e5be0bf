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
    BLOCK_H: tl.constexpr,
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
    """One program per token and BLOCK_H heads: of queries, then, where it writes, of keys, then of values.

    Queries go, in the activation's type, to ``prepared_query [T, HEADS, HEAD_DIM]``; keys and values to the
    cache, at the slots that the block table gives. What is not mapped there (-1), beyond it, or behind the
    last sequence is not written.
    """
    KEYS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H  # the first group of heads of keys
    VALUES: tl.constexpr = KEYS + (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0)
    group = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    cos = cos_cache
    sin = sin_cache
    if ROTARY_DIM > 0:
        position = tl.load(position_ids + token).to(tl.int64)
        cos += position * (ROTARY_DIM // 2)
        sin += position * (ROTARY_DIM // 2)
    if group < KEYS:
        head = group * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < HEADS)[:, None] & (d < HEAD_DIM)[None, :]
        x = _normed_and_rotated(
            query + token.to(tl.int64) * QUERY_STRIDE + head[:, None] * HEAD_DIM,
            inside,
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
        target = prepared_query + (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(target, x.to(prepared_query.dtype.element_ty), mask=inside)
    else:
        s = _sequence_of(token, cumulative_sequence_length, sequences)
        past = tl.load(past_seqlens + s, mask=s < sequences, other=0)
        logical = past + token - tl.load(cumulative_sequence_length + s)
        mapped = (s < sequences) & (logical < table_width * BLOCK_SIZE)
        entry = block_table + s.to(tl.int64) * table_width + logical // BLOCK_SIZE
        block = tl.load(entry, mask=mapped, other=-1)
        if block >= 0:
            slot = block.to(tl.int64) * BLOCK_SIZE + logical % BLOCK_SIZE
            head = (group - (KEYS if group < VALUES else VALUES)) * BLOCK_H + tl.arange(0, BLOCK_H)
            inside = (head < KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
            offset = token.to(tl.int64) * KEY_STRIDE + head[:, None] * HEAD_DIM
            row = slot * KV_HEADS + head
            if group < VALUES:
                x = _normed_and_rotated(
                    key + offset,
                    inside,
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
                _write(key_cache, key_scale_cache, row, x, inside, head < KV_HEADS, HEAD_DIM, CACHE)
            else:
                x = tl.load(value + offset + d[None, :], mask=inside, other=0.0).to(tl.float32)
                if NORM_VALUES:
                    x = x * _inverse_rms(x, HEAD_DIM, EPSILON)
                _write(value_cache, value_scale_cache, row, x, inside, head < KV_HEADS, HEAD_DIM, CACHE)


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
    """Of each row, as a column."""
    mean = tl.div_rn(tl.sum(x * x, axis=1), HEAD_DIM * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + EPSILON))[:, None]


@triton.jit
def _normed_and_rotated(
    rows,
    inside,
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
    """Heads ``[BLOCK_H, BLOCK_D]`` in float32, of pointers to their begins.

    Rotation reads each element's partner again: memory that was just read costs less than an exchange.
    """
    d = tl.arange(0, BLOCK_D)
    x = tl.load(rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        w = tl.load(weight + d, mask=d < HEAD_DIM, other=0.0)[None, :]
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
        other = tl.load(rows + partner[None, :], mask=inside & rotated[None, :], other=0.0).to(tl.float32)
        if NORM and not NORM_AFTER_ROTATION:
            other = other * inverse * tl.load(weight + partner, mask=rotated, other=0.0)[None, :]
        c = tl.load(cos + pair, mask=rotated, other=0.0)[None, :]
        s = tl.load(sin + pair, mask=rotated, other=0.0)[None, :]
        x = tl.where(rotated[None, :], x * c + tl.where(first[None, :], -other, other) * s, x)
    if NORM and NORM_AFTER_ROTATION:
        x = x * _inverse_rms(x, HEAD_DIM, EPSILON) * w
    return x


@triton.jit
def _write(cache, scales, row, x, inside, exists, HEAD_DIM: tl.constexpr, CACHE: tl.constexpr):
    """Float32 heads to rows ``slot * KV_HEADS + head`` of the cache, and their scales."""
    target = cache + row[:, None] * HEAD_DIM + tl.arange(0, x.shape[1])[None, :]
    if CACHE == "f16":
        tl.store(target, x.to(tl.float16), mask=inside)
    else:
        largest: tl.constexpr = 127.0 if CACHE == "int8" else 448.0
        # As integers, magnitudes keep their order and NaN is the largest of all, so that none is lost.
        magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale = tl.div_rn(tl.max(magnitudes, axis=1).to(tl.float32, bitcast=True), largest)
        scale = tl.where(scale < float("inf"), scale, float("nan"))
        usable = scale > 0
        divisor = tl.where(usable, scale, 1.0)[:, None]
        scaled = tl.where(usable[:, None], tl.div_rn(x, tl.broadcast_to(divisor, x.shape)), 0.0)
        scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
        codes = round_to_int8(scaled) if CACHE == "int8" else encode_e4m3(scaled)
        tl.store(target, codes, mask=inside)
        tl.store(scales + row, scale, mask=exists)


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
