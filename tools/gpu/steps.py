"""The arrays of a case's step, and what the NumPy reference makes of them.

What was never written is NaN everywhere: in the pool, in its scales, in the output and in the workspace.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.plugins import reference
from pagelet.plugins.float_packing import to_bf16
from pagelet.plugins.kernels.launch_plan import Shapes
from pagelet.plugins.kernels.variant import AttentionVariant
from pagelet.tools.gpu.cases import Case, Span

Array = NDArray[Any]
Arrays = dict[str, Array]

CACHE_DTYPES = {"f16": np.float16, "int8": np.int8, "fp8": np.uint8}
SCALES = ("key_scale_cache", "value_scale_cache")
POOL = ("key_cache", "value_cache", *SCALES)
_UNWRITTEN = {"f16": np.nan, "int8": 77, "fp8": 0x7F}  # 77 has the scale NaN, 0x7F is NaN itself
_SPARE_BLOCKS = 3
_WORD = 32  # bits of ancestor_mask


@dataclass(frozen=True)
class Step:
    """A case's arrays, float32 where the device has the activations' type.

    Attributes:
        shapes: what the plan is made from.
        inputs: all but the pool, by the names of the node's inputs.
        pool: caches, and scale caches where the cache has scales.
        new_slots: int64, flat slots of the pool that the step writes; none of a node that only reads.
    """

    variant: AttentionVariant
    shapes: Shapes
    inputs: Arrays
    pool: Arrays
    new_slots: Array


def build(case: Case) -> Step:
    """The arrays of a case, the same at every call."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    variant, spans = case.variant, case.kind.spans
    table, blocks = _block_table(variant, spans, rng)
    mapped = np.array([not each.padding for each in spans])
    pool = empty_pool(variant, blocks)
    for row, each in zip(table[mapped], (each for each in spans if not each.padding), strict=True):
        known = np.arange(each.past + (0 if variant.writes else each.rows))
        known = known[row[known // variant.block_size] >= 0]
        write_random(pool, reference.block_slots(row, known, variant.block_size), rng)
    rows = [each.rows for each in spans]
    ends = np.cumsum([0, *rows])
    past = np.array([each.past for each in spans], np.int32)
    parents = [_parents(each, case.kind.tree and not each.padding, rng) for each in spans]
    mask, depths = _trees(parents) if case.kind.tree else (None, [np.arange(count) for count in rows])
    positions = np.concatenate([p + depth for p, depth in zip(past.tolist(), depths, strict=True)])
    inputs = _heads(variant, int(ends[-1]), rng) | {
        "cumulative_sequence_length": ends.astype(np.int32),
        "past_seqlens": past,
        "block_table": table,
        "position_ids": positions.astype(np.int64),
    }
    if mask is not None:
        inputs["ancestor_mask"] = mask
    inputs |= tables_of(variant, int(positions.max()) + 1)
    new = reference.new_slots(np.cumsum([0, *np.array(rows)[mapped]]), past[mapped], table[mapped],
                              variant.block_size)  # fmt: skip
    return Step(
        variant,
        Shapes(int(ends[-1]), len(spans), table.shape[1], *(mask.shape if mask is not None else (0, 0))),
        inputs,
        pool,
        new if variant.writes else new[:0],
    )


def empty_pool(variant: AttentionVariant, blocks: int) -> Arrays:
    """Caches in which nothing was written."""
    shape = blocks, variant.block_size, variant.kv_num_heads, variant.head_dim
    dtype, unwritten = CACHE_DTYPES[variant.cache], _UNWRITTEN[variant.cache]
    pool = {name: np.full(shape, unwritten, dtype) for name in POOL[:2]}
    if variant.scaled:
        pool |= {name: np.full(shape[:3], np.nan, np.float32) for name in SCALES}
    return pool


def write_random(pool: Arrays, slots: Array, rng: np.random.Generator) -> None:
    """Tokens at flat slots of a pool."""
    for name in POOL[:2]:
        cache = pool[name]
        rows = rng.standard_normal((len(slots), *cache.shape[2:]), dtype=np.float32)
        reference.write(cache, pool.get(name.replace("_cache", "_scale_cache")), slots, rows)


def tables_of(variant: AttentionVariant, positions: int) -> Arrays:
    """Cosines and sines of a node that rotates."""
    if not variant.rotary_dim:
        return {}
    half = variant.rotary_dim // 2
    angles = np.arange(positions)[:, None] * 10000.0 ** -(np.arange(half) / half)
    return {"cos_cache": np.cos(angles).astype(np.float32), "sin_cache": np.sin(angles).astype(np.float32)}


def rounded(values: Array, activation: str) -> Array:
    """float32 with the nearest values of the activations' type."""
    return as_float(as_activation(values, activation), activation)


def as_activation(values: Array, activation: str) -> Array:
    """float16, or the bits of bfloat16 in uint16."""
    return values.astype(np.float16) if activation == "f16" else to_bf16(values)


def as_float(values: Array, activation: str) -> Array:
    """float32 of what `as_activation` gives."""
    if activation == "f16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)


def reference_step(variant: AttentionVariant, inputs: Arrays, pool: Arrays) -> Array:
    """What the node computes, float32 [T, Hq · D]; the pool is updated in place. Rows of padding are 0."""
    table, offsets = inputs["block_table"], inputs["cumulative_sequence_length"]
    counts = np.diff(offsets)
    kept = ~((inputs["past_seqlens"] == 0) & (table < 0).all(axis=1))
    rows = np.repeat(kept, counts)
    small: dict[str, Any] = {
        "cumulative_sequence_length": np.cumsum([0, *counts[kept]]).astype(np.int32),
        "past_seqlens": inputs["past_seqlens"][kept],
        "block_table": table[kept],
    }
    for name in ("query", "key", "value", "position_ids", "ancestor_mask"):
        if name in inputs:
            small[name] = inputs[name][rows]
    output = np.zeros((len(rows), variant.num_heads * variant.head_dim), np.float32)
    output[rows] = reference.paged_attention(
        **{**inputs, **small, **pool},
        num_heads=variant.num_heads,
        kv_num_heads=variant.kv_num_heads,
        scale=variant.scale,
        softcap=variant.softcap,
        local_window_size=variant.local_window_size,
        rotary_interleaved=variant.rotary_interleaved,
        rotary_dim=variant.rotary_dim,
        norm_epsilon=variant.norm_epsilon,
        norm_after_rotation=variant.norm_after_rotation,
        norm_values=variant.norm_values,
    )
    return output


def _heads(variant: AttentionVariant, tokens: int, rng: np.random.Generator) -> Arrays:
    """New queries, keys and values, and the weights of norms and sinks."""
    heads, kv_heads, size = variant.num_heads, variant.kv_num_heads, variant.head_dim
    columns = heads if not (variant.writes and variant.packed) else heads + 2 * kv_heads
    widths = {"query": columns * size}
    if variant.writes and not variant.packed:
        widths |= {"key": kv_heads * size, "value": kv_heads * size}
    found = {
        name: rounded(rng.standard_normal((tokens, width), dtype=np.float32), variant.activation)
        for name, width in widths.items()
    }
    for name, there, count in (
        ("q_norm_weight", variant.q_norm, size),
        ("k_norm_weight", variant.k_norm, size),
        ("head_sink", variant.sinks, heads),
    ):
        if there:
            found[name] = rng.uniform(-2, 2, count).astype(np.float32)
    return found


def _block_table(
    variant: AttentionVariant, spans: Sequence[Span], rng: np.random.Generator
) -> tuple[Array, int]:
    """Blocks in a random order, none for padding or before a window; and how many there are."""
    size, window = variant.block_size, variant.local_window_size
    ranges = []
    for each in spans:
        first = max(each.past + 1 - window, 0) // size if window > 0 else 0
        ranges.append(range(first, 0 if each.padding else -(-(each.past + each.rows) // size)))
    blocks = sum(map(len, ranges)) + _SPARE_BLOCKS
    free = iter(rng.permutation(blocks).tolist())
    table = np.full((len(spans), max(each.stop for each in ranges) + 1), -1, np.int32)
    for row, mine in zip(table, ranges, strict=True):
        row[mine.start : mine.stop] = [next(free) for _ in mine]
    return table, blocks


def _parents(each: Span, tree: bool, rng: np.random.Generator) -> list[int]:
    """Of each row, the row before it that it follows; -1: the past."""
    if not tree:
        return [index - 1 for index in range(each.rows)]
    return [int(rng.integers(max(index - 4, -1), index)) for index in range(each.rows)]


def _trees(parents: Sequence[Sequence[int]]) -> tuple[Array, list[Array]]:
    """ancestor_mask, and the depth of each sequence's rows."""
    words = -(-max(map(len, parents)) // _WORD)
    masks, depths = [], []
    for mine in parents:
        seen = np.zeros((len(mine), words * _WORD), bool)
        for index, parent in enumerate(mine):
            if parent >= 0:
                seen[index] = seen[parent]
                seen[index, parent] = True
        depths.append(seen.sum(axis=1))
        masks.append(np.packbits(seen, axis=1, bitorder="little").view("<i4"))
    return np.concatenate(masks), depths
