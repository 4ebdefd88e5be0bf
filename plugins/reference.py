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
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    softcap: float = 0.0,
    local_window_size: int = -1,
    rotary_interleaved: bool = False,
    rotary_dim: int = 0,
) -> npt.NDArray[np.float32]:
    """Attention of a ragged batch over a paged cache, which is updated in place.

    Args:
        query: packed QKV ``[T, (num_heads + 2 * kv_num_heads) * D]``, or ``[T, num_heads * D]`` with
            ``key`` and ``value`` given, each ``[T, kv_num_heads * D]``.
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
        scale: of the scores; ``None`` or 0 means ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 means they stay.
        local_window_size: keys that a row sees, itself included; -1 or 0 means all.
        rotary_interleaved: pairs are neighbours ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim / 2)``.
        rotary_dim: leading elements that are rotated; 0 means ``D``.

    Returns:
        ``[T, num_heads * D]``, float32.
    """
    tokens, head_size = query.shape[0], key_cache.shape[-1]
    if key is None or value is None:
        sizes = np.cumsum([num_heads, kv_num_heads]) * head_size
        query, key, value = np.split(query, sizes, axis=1)
    q = query.reshape(tokens, num_heads, head_size).astype(np.float32)
    k = key.reshape(tokens, kv_num_heads, head_size).astype(np.float32)
    v = value.reshape(tokens, kv_num_heads, head_size).astype(np.float32)
    if cos_cache is not None and sin_cache is not None and position_ids is not None:
        cos, sin = cos_cache[position_ids], sin_cache[position_ids]
        width = rotary_dim or head_size
        q, k = (rotate(x, cos, sin, width, rotary_interleaved) for x in (q, k))
    output = np.empty((tokens, num_heads, head_size))
    for s, past in enumerate(past_seqlens.tolist()):
        begin, end = cumulative_sequence_length[s : s + 2].tolist()
        positions = np.arange(past, past + end - begin)
        slots = block_slots(block_table[s], positions, key_cache.shape[1])
        write(key_cache, key_scale_cache, slots, k[begin:end])
        write(value_cache, value_scale_cache, slots, v[begin:end])
        for index, row in enumerate(range(begin, end)):
            path = ancestors(ancestor_mask, row, index)
            visible = np.concatenate([np.arange(past), past + path, [past + index]])
            visible = visible[-local_window_size:] if local_window_size > 0 else visible
            seen = block_slots(block_table[s], visible, key_cache.shape[1])
            keys = read(key_cache, key_scale_cache, seen)
            values = read(value_cache, value_scale_cache, seen)
            output[row] = attend(q[row], keys, values, scale or head_size**-0.5, softcap)
    return output.reshape(tokens, num_heads * head_size).astype(np.float32)


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
    query: FloatArray, keys: FloatArray, values: FloatArray, scale: float, softcap: float
) -> FloatArray:
    """One token's heads ``[Hq, D]`` over the keys and values ``[n, Hkv, D]`` that it sees: ``[Hq, D]``."""
    group = query.shape[0] // keys.shape[1]
    keys = np.repeat(keys.astype(np.float64), group, axis=1)
    values = np.repeat(values.astype(np.float64), group, axis=1)
    scores = np.einsum("hd,nhd->hn", query, keys) * scale
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    output: FloatArray = np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return output
