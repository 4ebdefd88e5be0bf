"""PagedAttention against the NumPy reference, under every instruction set that runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagelet.plugins import native, reference

# Scores of unit normals carry float32 errors of about 1e-6; weights and outputs (below 5 here) follow.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

EXAMPLES = 15 if "PAGELET_ISA" in os.environ else 60

# Past and new lengths around the edges of blocks (1 to 48 here) and partitions (256).
PASTS = st.sampled_from([0, 0, 1, 5, 15, 16, 31, 32, 33, 100, 255, 256, 257, 511, 512, 600])
NEW = st.sampled_from([0, 1, 1, 1, 2, 3, 7, 16, 17, 33, 70])
HEADS = st.sampled_from([(1, 1), (2, 2), (2, 1), (6, 2), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (9, 3)])
HEAD_SIZES = st.sampled_from([8, 16, 32, 40, 64, 80, 96, 128, 256, 512])
HEAD_WEIGHTS = st.sets(st.sampled_from(["q_norm_weight", "k_norm_weight", "head_sink"]))
CACHE_TYPES = ("f32", "f16", "int8", "fp8")


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    num_heads, kv_num_heads = draw(HEADS)
    head_size = draw(HEAD_SIZES)
    return {
        "num_heads": num_heads,
        "kv_num_heads": kv_num_heads,
        "head_size": head_size,
        "block_size": draw(st.sampled_from([1, 3, 16, 32, 48])),
        "scale": draw(st.sampled_from([0.0, 0.05])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        "local_window_size": draw(st.sampled_from([-1, -1, 0, 1, 2, 20, 100, 256, 300])),
        "rotary": draw(st.booleans()),
        "rotary_interleaved": draw(st.booleans()),
        "rotary_dim": draw(st.sampled_from([0, 0, 2, head_size // 2 // 2 * 2, head_size])),
        "packed": draw(st.booleans()),
        "cache_type": draw(st.sampled_from(CACHE_TYPES)),
        "head_weights": tuple(sorted(draw(HEAD_WEIGHTS))),
        "norm_epsilon": draw(st.sampled_from([1e-6, 0.0, 0.1])),
        "norm_after_rotation": draw(st.booleans()),
        "norm_values": draw(st.booleans()),
    }


WIDE = {"num_heads": 8, "kv_num_heads": 1, "head_size": 512, "norm_values": True}
WIDE |= {"head_weights": ("k_norm_weight", "q_norm_weight")}
SHORT = {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32}


@settings(max_examples=EXAMPLES, deadline=None)
@given(layers(), st.lists(st.tuples(PASTS, NEW), max_size=6), st.integers(0, 99), st.integers(1, 2))
@example(SHORT, [], 0, 2)
@example(SHORT, [(0, 0)], 0, 1)
@example(SHORT, [(600, 1)], 0, 2)
@example(SHORT, [(0, 300), (37, 0), (255, 2)], 0, 2)
@example(SHORT | {"local_window_size": 100}, [(600, 70), (500, 1)], 0, 2)
@example(SHORT | {"cache_type": "f16"}, [(0, 300), (37, 0), (255, 2)], 0, 2)
@example(SHORT | {"cache_type": "int8"}, [(0, 300), (37, 0), (255, 2)], 0, 2)
@example(SHORT | {"cache_type": "fp8"}, [(0, 300), (37, 0), (255, 2)], 0, 2)
@example(SHORT | {"head_weights": ("head_sink",), "local_window_size": 2}, [(600, 70), (255, 1)], 0, 2)
@example(WIDE | {"cache_type": "int8"}, [(0, 300), (600, 1)], 0, 2)
def test_op_matches_reference(
    attention: Any,
    make_layer: Any,
    make_world: Any,
    attributes: dict[str, Any],
    lengths: Any,
    seed: int,
    threads: int,
) -> None:
    layer = make_layer(**attributes)
    world = make_world(layer, [past + new for past, new in lengths], seed)
    step = world.step([(s, past, past + new) for s, (past, new) in enumerate(lengths)])
    expected_caches = world.with_past([past for past, _ in lengths])
    caches = expected_caches.copy()
    expected = world.reference(step, expected_caches)
    np.testing.assert_allclose(attention(layer, threads).run(step, caches), expected, **TOLERANCE)
    # To the bit, also where nothing was written or nothing new is.
    for name, cache in expected_caches.arrays().items():
        np.testing.assert_array_equal(caches.arrays()[name], cache, err_msg=name)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_blocks_below_the_window_may_be_unmapped(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str
) -> None:
    layer = make_layer(local_window_size=40, cache_type=cache_type)
    world = make_world(layer, [400])
    step = world.step([(0, 390, 400)])
    caches = world.with_past([390])
    expected = world.reference(step, caches.copy())
    first_needed = (390 - 40 + 1) // layer.block_size
    freed = world.block_table[0, :first_needed]
    for name, cache in caches.arrays().items():
        cache[freed] = world.caches().arrays()[name][freed]
    step["block_table"] = world.block_table.copy()
    step["block_table"][0, :first_needed] = -1
    np.testing.assert_allclose(attention(layer).run(step, caches), expected, **TOLERANCE)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_chained_nodes_share_the_caches(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str
) -> None:
    layer = make_layer(cache_type=cache_type)
    world = make_world(layer, [50, 7])
    step = world.step([(0, 0, 50), (1, 0, 7)])
    once, twice = world.caches(), world.caches()
    expected = attention(layer).run(step, once)
    np.testing.assert_array_equal(attention(layer, nodes=2).run(step, twice), expected)
    for name, cache in once.arrays().items():
        np.testing.assert_array_equal(twice.arrays()[name], cache)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_infinite_and_nan_values_stay_with_the_rows_that_see_them(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str
) -> None:
    layer = make_layer(num_heads=6, kv_num_heads=2, rotary=False, cache_type=cache_type)
    world = make_world(layer, [40])
    clean = attention(layer).run(world.step([(0, 0, 40)]), world.caches())
    world.qkv[0][20, -layer.head_size :] = np.nan  # the last KV head's value of token 20
    world.qkv[0][21, -3 * layer.head_size : -2 * layer.head_size] = np.inf  # and its key of token 21
    dirty = attention(layer).run(world.step([(0, 0, 40)]), world.caches())
    np.testing.assert_array_equal(dirty[:20], clean[:20])
    other_heads = 3 * layer.head_size
    np.testing.assert_array_equal(dirty[:, :other_heads], clean[:, :other_heads])
    assert np.isnan(dirty[20:, other_heads:]).all()


# What a cache stores at the edges: zeros, float32 and FP8 subnormals, ties, and what overflows FP16.
EDGES = [
    np.zeros(8),
    -np.zeros(8),
    np.array([1e-45, -1e-45, 1e-44, 0, 0, 0, 0, 0]),
    np.array([1e-38, -1e-39, 3e-40, 2e-43, 0, 0, 0, 0]),
    np.array([1, 0.5, 2.5 / 127, 3.5 / 127, -0.5 / 127, -1.5 / 127, 1e-9, 0]),
    np.array([448, 1.0625, 1.1875, -1.0625, 2**-9, 2**-10, 1.5 * 2**-9, -(2**-6) * 0.99]),
    np.array([448, 432, 416, 447.9, 2**-6, 7.5 * 2**-9, 2.5 * 2**-9, 0.5 * 2**-9]),
    np.array([65504, 65519.9, 65520, -1e6, 2**-24, 2**-25, 3 * 2**-25, 2**-14 * 0.9999]),
    np.array([3e38, -3e38, 1, 0, 0, 0, 0, 0]),
    np.array([np.nan, 1, 2, 3, 4, 5, 6, 7]),
    np.array([1, 2, 3, -np.inf, 4, 5, 6, 7]),
]


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_edges_are_stored_as_the_reference_stores_them(
    attention: Any, make_layer: Any, make_world: Any, cache_type: str
) -> None:
    layer = make_layer(
        num_heads=1, kv_num_heads=1, head_size=8, block_size=4, rotary=False, cache_type=cache_type
    )
    world = make_world(layer, [len(EDGES)])
    for row, edge in zip(world.qkv[0], EDGES, strict=True):
        row[8:16], row[16:] = edge, edge[::-1]
    step = world.step([(0, 0, len(EDGES))])
    caches, expected = world.caches(), world.caches()
    attention(layer).run(step, caches)
    slots = reference.block_slots(world.block_table[0], np.arange(len(EDGES)), layer.block_size)
    for cache, scales, rows in (
        (expected.key, expected.key_scale, world.qkv[0][:, 8:16]),
        (expected.value, expected.value_scale, world.qkv[0][:, 16:]),
    ):
        reference.write(cache, scales, slots, rows[:, None])
    for name, cache in expected.arrays().items():
        np.testing.assert_array_equal(caches.arrays()[name], cache, err_msg=name)


def test_every_fp8_code_is_read_as_the_reference_reads_it(
    attention: Any, make_layer: Any, make_world: Any
) -> None:
    layer = make_layer(
        num_heads=1, kv_num_heads=1, head_size=256, block_size=1, rotary=False, cache_type="fp8"
    )
    world = make_world(layer, [2])
    caches = world.with_past([1])
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN, which is never written
    caches.value[world.block_table[0, 0], 0, 0] = codes
    caches.value_scale[world.block_table[0, 0], 0, 0] = 1
    world.qkv[0][1, 512:] = 0
    world.qkv[0][1, :512] = 0  # all scores alike: the output is half of the value
    output = attention(layer).run(world.step([(0, 1, 2)]), caches)
    np.testing.assert_array_equal(output[0], reference.E4M3_VALUES[codes] / 2)


# Half a step between the largest codes, over the largest code.
@pytest.mark.parametrize(("cache_type", "bound"), [("int8", 0.5 / 127), ("fp8", 16 / 448)])
def test_quantized_caches_are_close_to_what_was_written(
    make_layer: Any, make_world: Any, cache_type: str, bound: float
) -> None:
    rows = np.random.default_rng(0).standard_normal((1000, 2, 32), dtype=np.float32)
    caches, slots = make_world(make_layer(cache_type=cache_type), [1000]).caches(), np.arange(1000)
    reference.write(caches.key, caches.key_scale, slots, rows)
    error = np.abs(reference.read(caches.key, caches.key_scale, slots) - rows).max(axis=-1)
    # An element over its scale is itself rounded: at 127 codes by 4e-6 of one.
    assert (error <= np.abs(rows).max(axis=-1) * bound * (1 + 1e-4)).all()


@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set(isa: str) -> None:
    if isa == native.selected_isa():
        pytest.skip(f"{isa} is what the other tests run")
    files = [
        str(Path(__file__).with_name(f"test_attention_{name}.py"))
        for name in ("reference", "invariance", "trees", "heads", "shared")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "not instruction_set", *files],
        env=os.environ | {"PAGELET_ISA": isa},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
