"""Row invariance: a row's bits depend on nothing but the row. All comparisons are ``==``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ALL_WEIGHTS = ("q_norm_weight", "k_norm_weight", "head_sink")
LAYERS = [
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32},
    {"num_heads": 4, "kv_num_heads": 4, "head_size": 40, "block_size": 16, "softcap": 5.0},
    {"num_heads": 8, "kv_num_heads": 1, "head_size": 128, "block_size": 16, "local_window_size": 70},
    {"num_heads": 2, "kv_num_heads": 1, "head_size": 256, "block_size": 3, "local_window_size": 300},
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32, "cache_type": "f16"},
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32, "cache_type": "int8"},
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32, "cache_type": "fp8"},
    {"num_heads": 4, "kv_num_heads": 4, "head_size": 40, "softcap": 5.0, "cache_type": "int8"},
    {"num_heads": 2, "kv_num_heads": 1, "head_size": 256, "local_window_size": 300, "cache_type": "fp8"},
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "head_weights": ALL_WEIGHTS, "norm_values": True},
    {"num_heads": 8, "kv_num_heads": 2, "local_window_size": 70, "head_weights": ("head_sink",)},
    {
        "num_heads": 2,
        "kv_num_heads": 1,
        "head_size": 512,
        "head_weights": ALL_WEIGHTS,
        "norm_after_rotation": True,
        "cache_type": "int8",
    },
]
LENGTH = 530  # three partitions


def run_in_chunks(session: Any, world: Any, sequence: int, cuts: list[int]) -> tuple[Any, Any]:
    """Outputs [length, Hq * D] and caches of one sequence, alone, in the chunks between `cuts`."""
    caches = world.caches()
    edges = [0, *cuts, world.lengths[sequence]]
    steps = [world.step([(sequence, a, b)]) for a, b in pairwise(edges)]
    return np.concatenate([session.run(step, caches) for step in steps]), caches


@pytest.mark.parametrize("attributes", LAYERS)
def test_prompt_whole_in_chunks_and_token_by_token(
    attention: Any, make_layer: Any, make_world: Any, attributes: dict[str, Any]
) -> None:
    layer = make_layer(**attributes)
    world = make_world(layer, [LENGTH], unused_blocks=0)
    whole, caches = run_in_chunks(attention(layer), world, 0, [])
    every = [list(range(step, LENGTH, step)) for step in (7, 1)]
    for cuts in ([1], [255], [256], [257], [100, 200, 300, 512], *every):
        rows, other = run_in_chunks(attention(layer), world, 0, cuts)
        np.testing.assert_array_equal(rows, whole, err_msg=f"cut at {cuts[:5]}")
        for name, cache in caches.arrays().items():
            np.testing.assert_array_equal(other.arrays()[name], cache)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(LAYERS),
    st.lists(
        st.tuples(st.integers(0, 530), st.sampled_from([0, 1, 1, 2, 5, 24, 90])), min_size=2, max_size=6
    ),
    st.integers(0, 99),
)
def test_row_alone_and_in_a_batch(
    attention: Any, make_layer: Any, make_world: Any, attributes: dict[str, Any], lengths: Any, seed: int
) -> None:
    layer = make_layer(**attributes)
    world = make_world(layer, [past + new for past, new in lengths], seed)
    caches = world.with_past([past for past, _ in lengths])
    spans = [(s, past, past + new) for s, (past, new) in enumerate(lengths)]
    batch = attention(layer, 2).run(world.step(spans), caches.copy())
    alone = [attention(layer).run(world.step([span]), caches.copy()) for span in spans]
    np.testing.assert_array_equal(batch, np.concatenate(alone))
    backwards = attention(layer).run(world.step(spans[::-1]), caches.copy())
    np.testing.assert_array_equal(backwards, np.concatenate(alone[::-1]))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(LAYERS), st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=8), st.integers(0, 99)
)
def test_any_cuts(
    attention: Any, make_layer: Any, make_world: Any, attributes: dict[str, Any], cuts: list[int], seed: int
) -> None:
    layer = make_layer(**attributes)
    world = make_world(layer, [LENGTH], seed)
    whole, _ = run_in_chunks(attention(layer, 2), world, 0, [])
    rows, _ = run_in_chunks(attention(layer), world, 0, sorted(cuts))
    np.testing.assert_array_equal(rows, whole)


@pytest.mark.parametrize("attributes", LAYERS)
@pytest.mark.parametrize("new", [1, 5, 300])
def test_threads(
    attention: Any, make_layer: Any, make_world: Any, attributes: dict[str, Any], new: int
) -> None:
    layer = make_layer(**attributes)
    world = make_world(layer, [900 + new, 300])
    caches = world.with_past([900, 0])
    step = world.step([(0, 900, 900 + new), (1, 0, 1)])
    one, two = (attention(layer, threads).run(step, caches.copy()) for threads in (1, 2))
    np.testing.assert_array_equal(one, two)
