"""What the kernel `prepare` writes, to the bit, and its codecs. Run by test_kernels_interpreted.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted_kernels import check, compare_caches, rounded, run, variant_of
from test_attention_reference import EDGES

from pagelet.plugins import reference
from pagelet.plugins.kernels.attention import decode_e4m3
from pagelet.plugins.kernels.prepare import encode_e4m3, round_to_int8

CACHE_TYPES = ("f16", "int8", "fp8")


@triton.jit
def _encode(x, out, CODEC: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    values = tl.load(x + i)
    if CODEC == "e4m3":
        tl.store(out + i, encode_e4m3(values))
    else:
        tl.store(out + i, round_to_int8(values))


@triton.jit
def _decode(codes, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, decode_e4m3(tl.load(codes + i)))


def encoded(x: Any, codec: str, dtype: Any) -> Any:
    size = 1 << (len(x) - 1).bit_length()
    padded = torch.zeros(size)
    padded[: len(x)] = torch.from_numpy(x)
    out = torch.empty(size, dtype=dtype)
    _encode[(1,)](padded, out, CODEC=codec, SIZE=size)
    return out[: len(x)].numpy()


def neighbourhood(values: Any) -> Any:
    """float32 values, what lies halfway between them, and the float32 next to each, of both signs."""
    values = np.unique(np.abs(values)).astype(np.float32)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, values[-1])])
    return np.concatenate([points, -points])


def test_every_e4m3_code_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out = torch.empty(256, dtype=torch.float16)
    _decode[(1,)](codes, out, SIZE=256)
    number = ~np.isnan(reference.E4M3_VALUES)
    np.testing.assert_array_equal(out.double().numpy()[number] * 256, reference.E4M3_VALUES[number])


def test_e4m3_is_encoded_to_the_nearest_ties_to_even() -> None:
    edges = neighbourhood(reference.E4M3_VALUES[:0x7F])
    every = np.arange(1 << 15, dtype=np.uint32) << 16  # all float32 with 7 bits of mantissa: all of bfloat16
    floats = np.stack([every, every + 1, every + 0x7FFF, every + 0x8000, every + 0xFFFF]).view(np.float32)
    floats = floats[floats <= 448]
    for x in (edges, floats, -floats, np.random.default_rng(0).uniform(-448, 448, 1 << 16)):
        x = x.astype(np.float32)
        np.testing.assert_array_equal(encoded(x, "e4m3", torch.uint8), reference.to_e4m3(x))


def test_int8_is_rounded_to_the_nearest_ties_to_even() -> None:
    x = np.concatenate([neighbourhood(np.arange(128)), np.linspace(-127, 127, 99999, dtype=np.float32)])
    np.testing.assert_array_equal(encoded(x, "int8", torch.int8), np.rint(x))


@pytest.mark.parametrize("activation", ["f16", "bf16"])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("packed", [True, False])
def test_edges_are_stored_as_the_reference_stores_them(
    make_layer: Any, make_world: Any, cache_type: str, activation: str, packed: bool
) -> None:
    kinds = {"num_heads": 1, "kv_num_heads": 1, "head_size": 16, "block_size": 4, "rotary": False}
    layer = make_layer(**kinds, cache_type=cache_type, packed=packed)
    world = make_world(layer, [len(EDGES)])
    for row, edge in zip(world.qkv[0], EDGES, strict=True):
        row[16:32], row[32:] = np.tile(edge, 2), np.tile(edge[::-1], 2)
    world.qkv[0] = rounded(world.qkv[0], activation)
    caches, expected = world.caches(), world.caches()
    step = world.step([(0, 0, len(EDGES))])
    run(variant_of(layer, activation), step | caches.arrays(), roles=("prepare",))
    slots = reference.block_slots(world.block_table[0], np.arange(len(EDGES)), layer.block_size)
    for cache, scales, rows in (
        (expected.key, expected.key_scale, world.qkv[0][:, 16:32]),
        (expected.value, expected.value_scale, world.qkv[0][:, 32:]),
    ):
        reference.write(cache, scales, slots, rows[:, None])
    for name, cache in expected.arrays().items():
        compare_caches(caches.arrays()[name], cache, name, exactly=True)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        (9, [2, 0, 1]),  # more than a program takes
        (1, [{0: 1, 31: 2, 32: 1, 38: 1}.get(s, 0) for s in range(40)]),  # more than lanes look for
    ],
)
def test_heads_and_sequences_beyond_one_program(
    make_layer: Any, make_world: Any, cache_type: str, heads: int, lengths: list[int]
) -> None:
    layer = make_layer(num_heads=heads, kv_num_heads=heads, head_size=16, cache_type=cache_type, rotary=False)
    check(make_world, layer, [(s, 5, 5 + length) for s, length in enumerate(lengths)])


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_rows_without_a_slot_are_not_written(make_layer: Any, make_world: Any, cache_type: str) -> None:
    """Those behind the last sequence, and those beyond the block table."""
    layer = make_layer(cache_type=cache_type, rotary=False)
    world = make_world(layer, [20, 3])
    world.qkv = [rounded(rows, "f16") for rows in world.qkv]
    caches, step = world.caches(), world.step([(0, 0, 20)])
    slots = reference.block_slots(world.block_table[0], np.arange(16), layer.block_size)
    width = layer.num_heads * layer.head_size
    keys, values = np.split(world.qkv[0][:16, width:].reshape(16, -1, layer.head_size), 2, axis=1)
    expected = world.caches()
    reference.write(expected.key, expected.key_scale, slots, keys)
    reference.write(expected.value, expected.value_scale, slots, values)
    step["query"] = np.concatenate([step["query"], world.qkv[1]])
    step["block_table"] = step["block_table"][:, :1].copy()
    run(variant_of(layer), step | caches.arrays(), roles=("prepare",))
    for name, cache in expected.arrays().items():
        compare_caches(caches.arrays()[name], cache, name, exactly=True)
