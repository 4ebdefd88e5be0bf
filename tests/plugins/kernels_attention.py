"""Attention by the Triton kernels against the NumPy reference. Run by test_kernels_interpreted.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_kernels import check, compare, rounded, run, variant_of
from test_attention_shared import queries_alone, reader_of
from test_attention_trees import BINARY, COMB, tree_step, world_of

CACHE_TYPES = ("f16", "int8", "fp8")
HEAD_SIZES = (64, 80, 96, 128, 256, 16, 112, 512)
HEADS = ((2, 2), (4, 2), (6, 2), (4, 1), (5, 1), (7, 1), (8, 1), (16, 1))
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"head_weights": ("head_sink",), "block_size": 32},
    {"softcap": 5.0, "rotary_interleaved": True, "block_size": 64},
    {"local_window_size": 20, "head_weights": ("head_sink",)},
    {"head_weights": ("k_norm_weight", "q_norm_weight"), "packed": False, "block_size": 256},
    {"head_weights": ("k_norm_weight", "q_norm_weight"), "norm_after_rotation": True, "norm_values": True},
    {"rotary_dim": 8, "local_window_size": 100, "softcap": 20.0, "block_size": 32},
    {"rotary": False, "scale": 0.05, "block_size": 48},
    {"rotary_dim": 12, "rotary_interleaved": True, "norm_values": True, "block_size": 3},
)
# Every head size and every group with every type of cache; activations, features and sizes of blocks beside.
CASES = [
    (HEAD_SIZES[i], HEADS[(i + 3 * c) % 8], cache, ("f16", "bf16")[(i + c) % 2], FEATURES[(i + 2 * c) % 9])
    for c, cache in enumerate(CACHE_TYPES)
    for i in range(8)
]


@pytest.mark.parametrize(("head_size", "heads", "cache_type", "activation", "features"), CASES)
def test_prefill_and_decode(
    make_layer: Any,
    make_world: Any,
    head_size: int,
    heads: tuple[int, int],
    cache_type: str,
    activation: str,
    features: dict[str, Any],
) -> None:
    kinds = {"head_size": head_size, "num_heads": heads[0], "kv_num_heads": heads[1]}
    layer = make_layer(**kinds, cache_type=cache_type, **features)
    prefill = [(0, 40, 55), (1, 0, 2)]
    assert check(make_world, layer, prefill, activation) == ["prepare", "prefill"]
    decode = [(0, 150, 151), (1, 37, 41), (2, 0, 1)]
    assert check(make_world, layer, decode, activation) == ["prepare", "decode", "merge"]


def test_a_prompt_in_chunks_beside_sequences_that_decode(make_layer: Any, make_world: Any) -> None:
    layer = make_layer(head_size=64, num_heads=8, kv_num_heads=2, cache_type="int8", block_size=32)
    check(make_world, layer, [(0, 0, 30), (1, 70, 71), (2, 5, 5), (3, 64, 80)])


@pytest.mark.parametrize("window", [-1, 1500])
def test_decode_in_many_parts_some_empty(make_layer: Any, make_world: Any, window: int) -> None:
    layer = make_layer(
        head_size=64,
        num_heads=2,
        kv_num_heads=1,
        rotary=False,
        block_size=64,
        cache_type="fp8",
        head_weights=("head_sink",),
        local_window_size=window,
    )
    check(make_world, layer, [(0, 5000, 5002), (1, 9, 10), (2, 700, 701)])


@pytest.mark.parametrize(("cache_type", "activation"), [("f16", "bf16"), ("int8", "f16"), ("fp8", "f16")])
@pytest.mark.parametrize("window", [-1, 5, 70])
def test_trees(make_layer: Any, make_world: Any, cache_type: str, activation: str, window: int) -> None:
    layer = make_layer(
        head_size=32, num_heads=3, kv_num_heads=1, cache_type=cache_type, local_window_size=window, trees=True
    )
    rows = 35 if window == 5 else 10  # of two words of a mask, of one
    for pasts, forest, role in (
        ((50,), (COMB[:rows],), "prefill_tree"),
        ((40, 3, 0), (BINARY[:7], [-1, 0, 0], [-1]), "decode_tree"),
    ):
        world = world_of(make_world, layer, pasts, forest, seed=3)
        world.qkv = [rounded(rows, activation) for rows in world.qkv]
        step = tree_step(world, pasts, forest)
        assert role in compare(world, step, world.with_past(pasts), activation)


@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("lengths", [(1, 5, 3), (20,)])
def test_a_chain_and_no_mask_are_the_same(
    make_layer: Any, make_world: Any, window: int, lengths: tuple[int, ...]
) -> None:
    layer = make_layer(head_size=32, local_window_size=window, cache_type="int8", trees=True)
    forest, pasts = [list(range(-1, length - 1)) for length in lengths], [33, 30, 7][: len(lengths)]
    world = world_of(make_world, layer, pasts, forest, seed=1)
    caches = [world.with_past(pasts) for _ in range(2)]
    step, variant = tree_step(world, pasts, forest), variant_of(layer)
    chained, _ = run(variant, step | caches[0].arrays())
    bare = {name: array for name, array in step.items() if name != "ancestor_mask"}
    plain, _ = run(variant, bare | caches[1].arrays())
    # Tiles at a window's edge may be reduced in another order: a few roundings of the output apart.
    np.testing.assert_allclose(chained, plain, rtol=2**-9, atol=2**-11)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("lengths", [[(40, 41), (0, 2)], [(30, 48), (3, 4)]])
def test_a_reader_has_what_the_owner_has(
    make_layer: Any, make_world: Any, cache_type: str, lengths: list[tuple[int, int]]
) -> None:
    layer = make_layer(cache_type=cache_type, head_weights=("k_norm_weight", "q_norm_weight"))
    world = make_world(layer, [end for _, end in lengths])
    step = world.step([(s, *span) for s, span in enumerate(lengths)])
    caches = world.with_past([begin for begin, _ in lengths])
    owned, _ = run(variant_of(layer), step | caches.arrays())
    written = caches.copy()
    read, launched = run(variant_of(reader_of(layer)), queries_alone(layer, step) | caches.arrays())
    np.testing.assert_array_equal(read, owned)
    assert "prepare" in launched
    for name, cache in written.arrays().items():
        np.testing.assert_array_equal(caches.arrays()[name], cache)


PASTS = st.sampled_from([0, 0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 130])
NEW = st.sampled_from([0, 1, 1, 1, 2, 3, 10])


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    num_heads, kv_num_heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1), (5, 1), (12, 1)]))
    head_size = draw(st.sampled_from([16, 32, 48]))
    weights = st.sets(st.sampled_from(["q_norm_weight", "k_norm_weight", "head_sink"]))
    return {
        "num_heads": num_heads,
        "kv_num_heads": kv_num_heads,
        "head_size": head_size,
        "block_size": draw(st.sampled_from([1, 16, 32, 48, 64, 128])),
        "scale": draw(st.sampled_from([0.0, 0.05])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.0])),
        "local_window_size": draw(st.sampled_from([-1, -1, 0, 1, 2, 20, 33, 100])),
        "rotary": draw(st.booleans()),
        "rotary_interleaved": draw(st.booleans()),
        "rotary_dim": draw(st.sampled_from([0, 2, head_size // 2])),
        "packed": draw(st.booleans()),
        "cache_type": draw(st.sampled_from(CACHE_TYPES)),
        "head_weights": tuple(sorted(draw(weights))),
        "norm_epsilon": draw(st.sampled_from([1e-6, 0.1])),
        "norm_after_rotation": draw(st.booleans()),
        "norm_values": draw(st.booleans()),
    }


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    layers(),
    st.lists(st.tuples(PASTS, NEW), min_size=1, max_size=3),
    st.integers(0, 99),
    st.sampled_from(["f16", "bf16"]),
)
def test_any_layer(
    make_layer: Any,
    make_world: Any,
    attributes: dict[str, Any],
    lengths: list[tuple[int, int]],
    seed: int,
    activation: str,
) -> None:
    spans = [(s, past, past + new) for s, (past, new) in enumerate(lengths)]
    check(make_world, make_layer(**attributes), spans, activation, seed)


def test_a_step_without_rows_launches_nothing(make_layer: Any, make_world: Any) -> None:
    layer = replace(make_layer(), cache_type="f16")
    assert check(make_world, layer, [(0, 5, 5)]) == []
