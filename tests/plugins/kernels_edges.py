"""What must never reach an output of the Triton kernels. Run by test_kernels_interpreted.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interpreted_kernels import TOLERANCE, check, compare, rounded, run, variant_of
from test_attention_trees import BINARY, path_to, tree_step, world_of

CACHE_TYPES = ("f16", "int8", "fp8")
TREE = BINARY[:15]


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("padding", [[1, 1], [40]])
def test_padding_is_harmless(
    make_layer: Any, make_world: Any, cache_type: str, window: int, padding: list[int]
) -> None:
    """Sequences without blocks write nothing and get zeros, also over several tiles of rows and keys."""
    layer = make_layer(cache_type=cache_type, local_window_size=window, head_weights=("head_sink",))
    world = make_world(layer, [40, 3])
    world.qkv = [rounded(rows, "f16") for rows in world.qkv]
    step, caches = world.step([(0, 39, 40), (1, 0, 3)]), world.with_past([39, 0])
    expected_caches = caches.copy()
    expected = world.reference(step, expected_caches)
    padded = dict(step)
    ends = step["cumulative_sequence_length"][-1] + np.cumsum(padding, dtype=np.int32)
    padded["cumulative_sequence_length"] = np.concatenate([step["cumulative_sequence_length"], ends])
    padded["past_seqlens"] = np.concatenate([step["past_seqlens"], np.zeros(len(padding), np.int32)])
    holes = np.full((len(padding), step["block_table"].shape[1]), -1, np.int32)
    padded["block_table"] = np.concatenate([step["block_table"], holes])
    for name in ("query", "position_ids"):
        more = np.ones((sum(padding), *step[name].shape[1:]), step[name].dtype)
        padded[name] = np.concatenate([step[name], more])
    output, _ = run(variant_of(layer), padded | caches.arrays())
    np.testing.assert_allclose(output[: len(expected)], expected, **TOLERANCE["f16"])
    np.testing.assert_array_equal(output[len(expected) :], 0)
    for name, cache in expected_caches.arrays().items():
        np.testing.assert_array_equal(caches.arrays()[name], cache, err_msg=name)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("begin", [199, 188])
@pytest.mark.parametrize("block_size", [16, 32])
def test_blocks_below_the_window_may_be_unmapped(
    make_layer: Any, make_world: Any, cache_type: str, begin: int, block_size: int
) -> None:
    layer = make_layer(local_window_size=40, cache_type=cache_type, block_size=block_size)
    world = make_world(layer, [200])
    world.qkv = [rounded(rows, "f16") for rows in world.qkv]
    step, caches = world.step([(0, begin, 200)]), world.with_past([begin])
    expected = world.reference(step, caches.copy())
    first_needed = (begin - 40 + 1) // block_size
    freed = world.block_table[0, :first_needed]
    for name, cache in caches.arrays().items():
        cache[freed] = world.caches().arrays()[name][freed]
    step["block_table"] = world.block_table.copy()
    step["block_table"][0, :first_needed] = -1
    output, _ = run(variant_of(layer), step | caches.arrays())
    np.testing.assert_allclose(output, expected, **TOLERANCE["f16"])


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("window", [-1, 9])
def test_infinite_and_nan_values_stay_with_the_rows_that_see_them(
    make_layer: Any, make_world: Any, cache_type: str, window: int
) -> None:
    layer = make_layer(
        num_heads=4, kv_num_heads=2, rotary=False, cache_type=cache_type, local_window_size=window
    )
    world, variant = make_world(layer, [24]), variant_of(layer)
    clean, _ = run(variant, world.step([(0, 0, 24)]) | world.caches().arrays())
    world.qkv[0][10, -layer.head_size :] = np.nan  # the last KV head's value of token 10
    world.qkv[0][11, -3 * layer.head_size : -2 * layer.head_size] = np.inf  # and its key of token 11
    dirty, _ = run(variant, world.step([(0, 0, 24)]) | world.caches().arrays())
    other_heads, last = 2 * layer.head_size, 11 + window if window > 0 else 24
    np.testing.assert_array_equal(dirty[:10], clean[:10])
    np.testing.assert_array_equal(dirty[last:], clean[last:])
    np.testing.assert_array_equal(dirty[:, :other_heads], clean[:, :other_heads])
    assert np.isnan(dirty[10 : last - 1, other_heads:]).all()


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_rows_outside_a_path_may_hold_nan(make_layer: Any, make_world: Any, cache_type: str) -> None:
    layer = make_layer(trees=True, cache_type=cache_type)
    world, variant = world_of(make_world, layer, [20], [TREE], seed=2), variant_of(layer)
    caches, step = world.with_past([20]), tree_step(world, [20], [TREE])
    clean, _ = run(variant, step | caches.copy().arrays())
    step["query"][4] = np.nan
    dirty, _ = run(variant, step | caches.arrays())
    below = [row for row in range(len(TREE)) if 4 in path_to(TREE, row)]
    others = sorted(set(range(len(TREE))) - set(below))
    np.testing.assert_array_equal(dirty[others], clean[others])
    assert np.isnan(dirty[below]).all()


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize(("magnitude", "span"), [(1e-3, (30, 40)), (12000, (30, 40)), (12000, (39, 40))])
def test_values_of_any_size_keep_their_precision(
    make_layer: Any, make_world: Any, cache_type: str, magnitude: float, span: tuple[int, int]
) -> None:
    """Near float16's largest, 65504, and where weights times scales come near its subnormals."""
    layer = make_layer(cache_type=cache_type)
    world = make_world(layer, [40])
    world.qkv[0][:, -2 * layer.head_size :] *= magnitude
    world.qkv[0] = rounded(world.qkv[0], "f16")
    step, caches = world.step([(0, *span)]), world.with_past([span[0]])
    if cache_type == "f16":
        caches.value[:] = rounded(caches.value.astype(np.float32) * magnitude, "f16")
    else:
        caches.value_scale[:] *= np.float32(magnitude)
    expected = world.reference(step, caches.copy())
    output, _ = run(variant_of(layer), step | caches.arrays())
    np.testing.assert_allclose(output / magnitude, expected / magnitude, **TOLERANCE["f16"])


def test_scores_far_apart_and_masked_tiles_make_no_nan(make_layer: Any, make_world: Any) -> None:
    """Scores of thousands: all but the largest key's weight is zero."""
    layer = make_layer(scale=200.0, rotary=False, cache_type="f16")
    world = make_world(layer, [40])
    world.qkv = [rounded(rows, "f16") for rows in world.qkv]
    assert np.isfinite(run(variant_of(layer), world.step([(0, 0, 40)]) | world.caches().arrays())[0]).all()


@pytest.mark.parametrize(("past", "new"), [(127, 1), (112, 16)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_table_without_a_spare_column(
    make_layer: Any, make_world: Any, past: int, new: int, block_size: int
) -> None:
    layer = make_layer(block_size=block_size, cache_type="f16")
    world = make_world(layer, [past + new])
    world.qkv = [rounded(rows, "f16") for rows in world.qkv]
    step = world.step([(0, past, past + new)])
    step["block_table"] = np.ascontiguousarray(step["block_table"][:, :-1])
    compare(world, step, world.with_past([past]))


def test_more_sequences_than_lanes_that_look_for_one(make_layer: Any, make_world: Any) -> None:
    layer = make_layer(num_heads=2, kv_num_heads=1, head_size=16, cache_type="int8", rotary=False)
    check(make_world, layer, [(s, s, s + (s % 10 == 3)) for s in range(45)])
