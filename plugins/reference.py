"""NumPy reference of the paged attention contract: the oracle of every backend.

Float64 inside, no speed. What goes into a cache is computed in float32 as the contract says, so that it has
the same bits as an op's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[Any]
IntArray = npt.NDArray[Any]


def paged_attention(
    query: FloatArray,
    key_cache: FloatArray,
    value_cache: FloatArray,
    cumulative_sequence_length: IntArray,
    past_seqlens: IntArray,
    block_table: IntArray,
    cos_cache: FloatArray | None = None,
    sin_cache: FloatArray | None = None,
    position_ids: IntArray | None = None,
    ancestor_mask: IntArray | None = None,
    *,
    key_scale_cache: FloatArray | None = None,
    value_scale_cache: FloatArray | None = None,
    key: FloatArray | None = None,
    value: FloatArray | None = None,
    q_norm_weight: FloatArray | None = None,
    k_norm_weight: FloatArray | None = None,
    head_sink: FloatArray | None = None,
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    softcap: float = 0.0,
    local_window_size: int = -1,
    rotary_interleaved: bool = False,
    rotary_dim: int = 0,
    norm_epsilon: float = 1e-6,
    norm_after_rotation: bool = False,
    norm_values: bool = False,
) -> npt.NDArray[np.float32]:
    """Attention of a ragged batch over a paged cache, which is updated in place.

    Args:
        query: packed QKV ``[T, (num_heads + 2 * kv_num_heads) * D]``, or ``[T, num_heads * D]`` with
            ``key`` and ``value`` given, each ``[T, kv_num_heads * D]``. ``[T, num_heads * D]`` without them:
            nothing is written, the caches hold the new tokens already (of the layer that owns them).
        key_cache, value_cache: ``[blocks, block_size, kv_num_heads, D]``, float32, float16, int8, or uint8
            that holds the bits of FP8 E4M3FN.
        key_scale_cache, value_scale_cache: ``[blocks, block_size, kv_num_heads]``, float32, for int8 and
            FP8 (see `quantize`); updated in place like the caches.
        cumulative_sequence_length: ``[S + 1]``, the rows at which each sequence begins and ends.
        past_seqlens: ``[S]``, tokens already in the cache.
        block_table: ``[S, max_blocks]``, the physical block of each logical block.
        cos_cache, sin_cache: ``[max_pos, rotary_dim / 2]``; without them nothing is rotated.
        position_ids: ``[T]``, rows of the two.
        ancestor_mask: ``[T, words]``, int32: bit ``j % 32`` of word ``j / 32`` says that a row sees the
            ``j``-th new row of its sequence, beside the past and itself. ``None`` or ``[0, 0]``: it sees all
            before it.
        q_norm_weight, k_norm_weight: ``[D]``, float32: each query head, each key head gets RMSNorm.
        head_sink: ``[num_heads]``, a logit per query head (neither scaled nor capped) that takes part in the
            softmax and has no value (StreamingLLM, https://arxiv.org/abs/2309.17453, section 3.3).
        scale: of the scores; ``None`` or 0 means ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 means they stay.
        local_window_size: keys that a row sees, itself included; -1 or 0 means all.
        rotary_interleaved: pairs are neighbours ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim / 2)``.
        rotary_dim: leading elements that are rotated; 0 means ``D``.
        norm_epsilon: of every RMSNorm here.
        norm_after_rotation: queries and keys are rotated first, then normed.
        norm_values: value heads get RMSNorm without a weight before they are written.

    Returns:
        ``[T, num_heads * D]``, float32.
    """
    tokens, head_size = query.shape[0], key_cache.shape[-1]

    def prepared(rows: FloatArray, norm_weight: FloatArray | None) -> FloatArray:
        heads = split_heads(rows, head_size)
        if norm_weight is not None and not norm_after_rotation:
            heads = normalize(heads, norm_weight, norm_epsilon)
        if cos_cache is not None and sin_cache is not None and position_ids is not None:
            cos, sin = cos_cache[position_ids], sin_cache[position_ids]
            heads = rotate(heads, cos, sin, rotary_dim or head_size, rotary_interleaved)
        if norm_weight is not None and norm_after_rotation:
            heads = normalize(heads, norm_weight, norm_epsilon)
        return heads

    if key is None and query.shape[1] != num_heads * head_size:
        sizes = np.cumsum([num_heads, kv_num_heads]) * head_size
        query, key, value = np.split(query, sizes, axis=1)
    if key is not None and value is not None:
        slots = new_slots(cumulative_sequence_length, past_seqlens, block_table, key_cache.shape[1])
        values = split_heads(value, head_size)
        values = normalize(values, None, norm_epsilon) if norm_values else values
        write(key_cache, key_scale_cache, slots, prepared(key, k_norm_weight))
        write(value_cache, value_scale_cache, slots, values)
    queries = prepared(query, q_norm_weight)
    output = np.empty((tokens, num_heads, head_size))
    for s, past in enumerate(past_seqlens.tolist()):
        begin, end = cumulative_sequence_length[s : s + 2].tolist()
        for index, row in enumerate(range(begin, end)):
            path = ancestors(ancestor_mask, row, index)
            visible = np.concatenate([np.arange(past), past + path, [past + index]])
            visible = visible[-local_window_size:] if local_window_size > 0 else visible
            seen = block_slots(block_table[s], visible, key_cache.shape[1])
            output[row] = attend(
                queries[row],
                read(key_cache, key_scale_cache, seen),
                read(value_cache, value_scale_cache, seen),
                scale or head_size**-0.5,
                softcap,
                head_sink,
            )
    return output.reshape(tokens, num_heads * head_size).astype(np.float32)


def split_heads(rows: FloatArray, head_size: int) -> npt.NDArray[np.float32]:
    """``[T, heads * D]`` as float32 ``[T, heads, D]``."""
    return rows.reshape(len(rows), rows.shape[1] // head_size, head_size).astype(np.float32)


def new_slots(
    cumulative_sequence_length: IntArray, past_seqlens: IntArray, block_table: IntArray, block_size: int
) -> IntArray:
    """Where each new token goes: ``[T]``, of the arguments of `paged_attention`."""
    lengths = np.diff(cumulative_sequence_length)
    slots = [
        block_slots(row, np.arange(past, past + length), block_size)
        for row, past, length in zip(block_table, past_seqlens.tolist(), lengths.tolist(), strict=True)
    ]
    return np.concatenate([np.empty(0, np.int64), *slots])


def ancestors(mask: IntArray | None, row: int, index: int) -> IntArray:
    """Of the rows before ``row``, the one at ``index`` in its sequence, those that it sees, ascending."""
    if mask is None or mask.size == 0:
        return np.arange(index)
    bits = mask[row].astype("<i4").view(np.uint8)
    seen: IntArray = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:index])
    return seen


def block_slots(block_row: IntArray, positions: IntArray, block_size: int) -> IntArray:
    """The slots ``block * block_size + offset`` of logical positions, for one sequence's row of the table."""
    slots: IntArray = (
        block_row[positions // block_size].astype(np.int64) * block_size + positions % block_size
    )
    return slots


def write(cache: FloatArray, scale_cache: FloatArray | None, slots: IntArray, rows: FloatArray) -> None:
    """Stores float32 ``rows`` ``[n, Hkv, D]`` at ``slots``; with a scale cache, their codes and scales."""
    flat = cache.reshape(-1, *cache.shape[2:])
    if scale_cache is None:
        with np.errstate(over="ignore"):  # beyond float16's 65504: infinity
            flat[slots] = rows.astype(cache.dtype)
    else:
        flat[slots], scale_cache.reshape(-1, cache.shape[2])[slots] = quantize(rows, cache.dtype)


def read(cache: FloatArray, scale_cache: FloatArray | None, slots: IntArray) -> FloatArray:
    """What the cache holds at ``slots``: float64 ``[n, Hkv, D]``."""
    rows = cache.reshape(-1, *cache.shape[2:])[slots]
    if cache.dtype == np.uint8:
        rows = E4M3_VALUES[rows]
    scales = 1.0 if scale_cache is None else scale_cache.reshape(-1, cache.shape[2])[slots][..., None]
    return rows.astype(np.float64) * scales


def quantize(rows: FloatArray, dtype: npt.DTypeLike) -> tuple[FloatArray, FloatArray]:
    """Codes (int8, or uint8 for the bits of E4M3FN) and float32 scales of float32 rows ``[..., D]``.

    A row's scale is its largest magnitude over the largest code (127, 448); its codes are the elements over
    the scale, rounded to the nearest, ties to even. All in float32. A row of zeros has the scale 0; one with
    NaN or infinity the scale NaN; the codes of both are 0.
    """
    rows = rows.astype(np.float32)
    largest = np.float32(127 if dtype == np.int8 else 448)
    scales = np.abs(rows).max(axis=-1) / largest
    scales[~np.isfinite(scales)] = np.nan
    usable = scales[..., None] > 0
    scaled = np.divide(rows, scales[..., None], out=np.zeros_like(rows), where=usable)
    scaled = np.clip(scaled, -largest, largest)
    return (np.rint(scaled).astype(np.int8) if dtype == np.int8 else to_e4m3(scaled)), scales


def _e4m3_values() -> npt.NDArray[np.float64]:
    """The value of each FP8 E4M3FN code (OCP 8-bit floating point specification, revision 1.0)."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    magnitudes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10))
    values: npt.NDArray[np.float64] = np.where(codes < 128, magnitudes, -magnitudes)
    values[[0x7F, 0xFF]] = np.nan
    return values


E4M3_VALUES = _e4m3_values()


def to_e4m3(x: FloatArray) -> npt.NDArray[np.uint8]:
    """The codes of the nearest E4M3FN values, ties to even, for finite ``x`` of at most 448."""
    magnitudes = np.abs(x.astype(np.float64))
    step = 2.0 ** (np.maximum(np.frexp(magnitudes)[1] - 1, -6) - 3)
    codes = np.searchsorted(E4M3_VALUES[:0x7F], np.rint(magnitudes / step) * step)
    signed: npt.NDArray[np.uint8] = (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)
    return signed


def normalize(x: FloatArray, weight: FloatArray | None, epsilon: float) -> FloatArray:
    """RMSNorm (https://arxiv.org/abs/1910.07467) of the heads ``[..., D]``; without a weight it is 1.

    In float32 and in the op's order, without fused products: lane ``l`` of 8 sums the squares of elements
    ``l, l + 8, …``; the lanes are added as a tree, ``l`` with ``l + 4``, with ``l + 2``, ….
    """
    squares = np.square(x, dtype=np.float32).reshape(*x.shape[:-1], x.shape[-1] // 8, 8)
    lanes = np.add.accumulate(squares, axis=-2)[..., -1, :]  # one after the other, unlike a sum
    for half in (4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    inverse = np.float32(1) / np.sqrt(lanes / np.float32(x.shape[-1]) + np.float32(epsilon))
    normed: FloatArray = x * inverse
    return normed if weight is None else normed * weight.astype(np.float32)


def rotate(x: FloatArray, cos: FloatArray, sin: FloatArray, width: int, interleaved: bool) -> FloatArray:
    """Rotary position embedding (RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2).

    Rotates the first ``width`` elements of ``x`` ``[T, heads, D]`` by ``cos`` and ``sin`` ``[T, width / 2]``.
    """
    half = width // 2
    low, high = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(half), slice(half, width))
    out: FloatArray = x.copy()
    cos, sin = cos[:, None], sin[:, None]
    out[..., low] = x[..., low] * cos - x[..., high] * sin
    out[..., high] = x[..., high] * cos + x[..., low] * sin
    return out


def attend(
    query: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    scale: float,
    softcap: float,
    head_sink: FloatArray | None = None,
) -> FloatArray:
    """One token's heads ``[Hq, D]`` over the keys and values ``[n, Hkv, D]`` that it sees: ``[Hq, D]``."""
    group = query.shape[0] // keys.shape[1]
    keys = np.repeat(keys.astype(np.float64), group, axis=1)
    values = np.repeat(values.astype(np.float64), group, axis=1)
    scores = np.einsum("hd,nhd->hn", query, keys) * scale
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    if head_sink is not None:  # one more key, whose value is zero
        scores = np.concatenate([scores, head_sink[:, None]], axis=1)
        values = np.concatenate([values, np.zeros_like(values[:1])])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    output: FloatArray = np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return output
