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

from pagelet.plugins import native

# Scores of unit normals carry float32 errors of about 1e-6; weights and outputs (below 5 here) follow.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

EXAMPLES = 15 if "PAGELET_ISA" in os.environ else 60

# Past and new lengths around the edges of blocks (1 to 48 here) and partitions (256).
PASTS = st.sampled_from([0, 0, 1, 5, 15, 16, 31, 32, 33, 100, 255, 256, 257, 511, 512, 600])
NEW = st.sampled_from([0, 1, 1, 1, 2, 3, 7, 16, 17, 33, 70])
HEADS = st.sampled_from([(1, 1), (2, 2), (2, 1), (6, 2), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (9, 3)])
HEAD_SIZES = st.sampled_from([8, 16, 32, 40, 64, 80, 96, 128, 256])


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
    }


SHORT = {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32}


@settings(max_examples=EXAMPLES, deadline=None)
@given(layers(), st.lists(st.tuples(PASTS, NEW), max_size=6), st.integers(0, 99), st.integers(1, 2))
@example(SHORT, [], 0, 2)
@example(SHORT, [(0, 0)], 0, 1)
@example(SHORT, [(600, 1)], 0, 2)
@example(SHORT, [(0, 300), (37, 0), (255, 2)], 0, 2)
@example(SHORT | {"local_window_size": 100}, [(600, 70), (500, 1)], 0, 2)
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
    before = caches.copy()
    expected = world.reference(step, expected_caches)
    np.testing.assert_allclose(attention(layer, threads).run(step, caches), expected, **TOLERANCE)
    np.testing.assert_allclose(caches.key, expected_caches.key, **TOLERANCE)  # NaN in the same places
    np.testing.assert_array_equal(caches.value, expected_caches.value)
    # What was there before is untouched.
    np.testing.assert_array_equal(np.where(np.isnan(before.key), np.nan, caches.key), before.key)


def test_blocks_below_the_window_may_be_unmapped(attention: Any, make_layer: Any, make_world: Any) -> None:
    layer = make_layer(local_window_size=40)
    world = make_world(layer, [400])
    step = world.step([(0, 390, 400)])
    caches = world.with_past([390])
    expected = world.reference(step, caches.copy())
    first_needed = (390 - 40 + 1) // layer.block_size
    freed = world.block_table[0, :first_needed]
    caches.key[freed], caches.value[freed] = np.nan, np.nan
    step["block_table"] = world.block_table.copy()
    step["block_table"][0, :first_needed] = -1
    np.testing.assert_allclose(attention(layer).run(step, caches), expected, **TOLERANCE)


def test_chained_nodes_share_the_caches(attention: Any, make_layer: Any, make_world: Any) -> None:
    layer = make_layer()
    world = make_world(layer, [50, 7])
    step = world.step([(0, 0, 50), (1, 0, 7)])
    once, twice = world.caches(), world.caches()
    expected = attention(layer).run(step, once)
    np.testing.assert_array_equal(attention(layer, nodes=2).run(step, twice), expected)
    np.testing.assert_array_equal(twice.key, once.key)


def test_infinite_and_nan_values_stay_with_the_rows_that_see_them(
    attention: Any, make_layer: Any, make_world: Any
) -> None:
    layer = make_layer(num_heads=6, kv_num_heads=2, rotary=False)
    world = make_world(layer, [40])
    clean = attention(layer).run(world.step([(0, 0, 40)]), world.caches())
    world.qkv[0][20, -layer.head_size :] = np.nan  # the last KV head's value of token 20
    world.qkv[0][21, -3 * layer.head_size : -2 * layer.head_size] = np.inf  # and its key of token 21
    dirty = attention(layer).run(world.step([(0, 0, 40)]), world.caches())
    np.testing.assert_array_equal(dirty[:20], clean[:20])
    other_heads = 3 * layer.head_size
    np.testing.assert_array_equal(dirty[:, :other_heads], clean[:, :other_heads])
    assert np.isnan(dirty[20:, other_heads:]).all()


@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set(isa: str) -> None:
    if isa == native.selected_isa():
        pytest.skip(f"{isa} is what the other tests run")
    files = [
        str(Path(__file__).with_name(f"test_attention_{name}.py")) for name in ("reference", "invariance")
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
