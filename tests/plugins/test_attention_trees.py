"""Trees of drafted tokens: every path has the bits of the same tokens in a chain. Comparisons without a
tolerance are ``==``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

Tree = Sequence[int]  # the parent of each row, -1: a root

# As in test_attention_reference.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
ALL_WEIGHTS = ("q_norm_weight", "k_norm_weight", "head_sink")
LAYERS = [
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32},
    {"num_heads": 4, "kv_num_heads": 4, "head_size": 40, "block_size": 16, "softcap": 5.0},
    {"num_heads": 8, "kv_num_heads": 1, "head_size": 128, "block_size": 16, "local_window_size": 70},
    {"num_heads": 4, "kv_num_heads": 2, "head_size": 32, "block_size": 3, "local_window_size": 3},
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32, "cache_type": "f16"},
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32, "cache_type": "int8"},
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "block_size": 32, "cache_type": "fp8"},
    {"num_heads": 2, "kv_num_heads": 1, "head_size": 8, "local_window_size": 300, "cache_type": "int8"},
    {"num_heads": 4, "kv_num_heads": 2, "head_size": 16, "local_window_size": 5, "cache_type": "fp8"},
    {"num_heads": 9, "kv_num_heads": 3, "head_size": 64, "head_weights": ALL_WEIGHTS, "norm_values": True},
    {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 3, "head_weights": ("head_sink",)},
    {"num_heads": 2, "kv_num_heads": 1, "head_size": 512, "head_weights": ALL_WEIGHTS, "cache_type": "int8"},
]
PASTS = st.sampled_from([0, 1, 31, 32, 33, 250, 255, 256, 257, 500, 511, 512, 600])


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Mostly deep ones, so that paths reach over the edges of blocks, windows and partitions."""
    rows = draw(st.sampled_from([1, 1, 2, 5, 12, 30, 64]))
    latest = draw(st.sampled_from([1, 2, 5, 64]))
    return [draw(st.integers(max(-1, row - latest), row - 1)) for row in range(rows)]


def path_to(tree: Tree, row: int) -> list[int]:
    return [*path_to(tree, tree[row]), row] if row >= 0 else []


def mask_of(forest: Sequence[Tree], own: bool = False) -> Any:
    """int32 [rows of all trees, words]; `own`: with the bit of the row itself."""
    words = max(1, *(-(-len(tree) // 32) for tree in forest))
    bits = np.zeros((sum(map(len, forest)), 32 * words), np.uint8)
    paths = (path_to(tree, row) for tree in forest for row in range(len(tree)))
    for row, path in zip(bits, paths, strict=True):
        row[path if own else path[:-1]] = 1
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)


def tree_step(world: Any, pasts: Sequence[int], forest: Sequence[Tree], own: bool = False) -> dict[str, Any]:
    spans = [(s, past, past + len(tree)) for s, (past, tree) in enumerate(zip(pasts, forest, strict=True))]
    step: dict[str, Any] = world.step(spans) | {"ancestor_mask": mask_of(forest, own)}
    depths = [len(path_to(tree, row)) - 1 for tree in forest for row in range(len(tree))]
    step["position_ids"] = np.repeat(pasts, list(map(len, forest))) + np.array(depths, np.int64)
    return step


def path_step(world: Any, sequence: int, past: int, path: Sequence[int]) -> dict[str, Any]:
    """The tokens of one path as a chain, without a mask."""
    step: dict[str, Any] = world.step([(sequence, past, past + len(path))])
    return step | {"query": world.qkv[sequence][past + np.array(path)]}


def world_of(make: Any, layer: Any, pasts: Sequence[int], forest: Sequence[Tree], seed: int) -> Any:
    return make(layer, [past + len(tree) for past, tree in zip(pasts, forest, strict=True)], seed)


STAR, BINARY = [-1] * 7, [(row - 1) // 2 for row in range(31)]
CHAIN, COMB = list(range(-1, 63)), [row - 1 - row % 2 for row in range(64)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LAYERS),
    st.lists(st.tuples(PASTS, trees()), min_size=1, max_size=4),
    st.integers(0, 99),
    st.integers(1, 2),
    st.booleans(),
)
@example(LAYERS[0], [(0, STAR), (255, COMB), (600, [-1]), (250, BINARY)], 0, 2, False)
@example(LAYERS[3], [(0, COMB), (31, CHAIN)], 0, 2, True)
@example(LAYERS[7], [(511, COMB)], 0, 2, True)
def test_every_path_has_the_bits_of_its_chain(
    attention: Any,
    make_layer: Any,
    make_world: Any,
    attributes: dict[str, Any],
    sequences: list[tuple[int, list[int]]],
    seed: int,
    threads: int,
    own: bool,
) -> None:
    pasts, forest = zip(*sequences, strict=True)
    world = world_of(make_world, make_layer(**attributes, trees=True), pasts, forest, seed)
    caches, plain = world.with_past(pasts), attention(make_layer(**attributes))
    step = tree_step(world, pasts, forest, own)
    expected_caches, written = caches.copy(), caches.copy()
    expected = world.reference(step, expected_caches)
    output = attention(world.layer, threads).run(step, written)
    np.testing.assert_allclose(output, expected, **TOLERANCE)
    for name, cache in expected_caches.arrays().items():
        np.testing.assert_array_equal(written.arrays()[name], cache, err_msg=name)
    begin = 0
    for s, (past, tree) in enumerate(sequences):
        for leaf in set(range(len(tree))) - set(tree):
            path = path_to(tree, leaf)
            chain = plain.run(path_step(world, s, past, path), caches.copy())
            np.testing.assert_array_equal(output[begin + np.array(path)], chain, err_msg=f"{s}: {path}")
        begin += len(tree)


@pytest.mark.parametrize("attributes", LAYERS)
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_a_chain_and_no_mask_are_the_same(
    attention: Any, make_layer: Any, make_world: Any, attributes: dict[str, Any], rows: int
) -> None:
    layer = make_layer(**attributes, trees=True)
    forest = [list(range(-1, rows - 1)), [], [-1], [-1, 0, 1]]
    pasts = [250, 3, 33, 511]
    world = world_of(make_world, layer, pasts, forest, seed=1)
    caches = [world.with_past(pasts) for _ in range(4)]
    step = tree_step(world, pasts, forest)
    bare = {name: array for name, array in step.items() if name != "ancestor_mask"}
    expected = attention(make_layer(**attributes)).run(bare, caches[0])
    masks = [step["ancestor_mask"], mask_of(forest, own=True), np.empty((0, 0), np.int32)]
    for mask, other in zip(masks, caches[1:], strict=True):
        output = attention(layer, 2).run(step | {"ancestor_mask": mask}, other)
        np.testing.assert_array_equal(output, expected)
        for name, cache in caches[0].arrays().items():
            np.testing.assert_array_equal(other.arrays()[name], cache)


def test_rows_outside_a_path_may_hold_nan(attention: Any, make_layer: Any, make_world: Any) -> None:
    layer = make_layer(trees=True)
    world = world_of(make_world, layer, [20], [BINARY], seed=2)
    caches, step = world.with_past([20]), tree_step(world, [20], [BINARY])
    clean = attention(layer).run(step, caches.copy())
    step["query"][4] = np.nan
    dirty = attention(layer).run(step, caches)
    below = [row for row in range(len(BINARY)) if 4 in path_to(BINARY, row)]
    others = sorted(set(range(len(BINARY))) - set(below))
    np.testing.assert_array_equal(dirty[others], clean[others])
    assert np.isnan(dirty[below]).all()


@pytest.mark.parametrize(
    ("row", "bits", "message"),
    [
        (2, 0b1000, "row 2 of sequence 1 descends from row 3, expected rows before it"),
        (2, 1 << 31, "row 2 of sequence 1 descends from row 31, expected rows before it"),
        (4, 1 << 5, "row 4 of sequence 1 descends from row 5, expected rows before it"),
        (4, 0b1000, "row 4 of sequence 1 descends from row 3, expected all ancestors of that row too"),
        (4, 0b0111, "row 4 of sequence 1 descends from row 2, expected .* and no others"),
    ],
)
def test_what_is_no_tree(
    attention: Any, make_layer: Any, make_world: Any, row: int, bits: int, message: str
) -> None:
    forest = [[-1, 0], [-1, 0, 0, 1, 2]]
    world = world_of(make_world, make_layer(trees=True), [9, 3], forest, seed=0)
    caches, step = world.with_past([9, 3]), tree_step(world, [9, 3], forest)
    step["ancestor_mask"].view(np.uint32)[2 + row] = bits
    with pytest.raises(Exception, match=message):
        attention(world.layer).run(step, caches.copy())
    np.testing.assert_allclose(
        attention(world.layer).run(tree_step(world, [9, 3], forest), caches.copy()),
        world.reference(tree_step(world, [9, 3], forest), caches.copy()),
        **TOLERANCE,
    )


@pytest.mark.parametrize(
    ("rows", "shape", "message"),
    [
        (5, (4, 1), r"ancestor_mask has shape \[4, 1\], expected \[5, any\]"),
        (5, (0, 1), r"ancestor_mask has shape \[0, 1\], expected \[5, any\]"),
        (5, (5, 0), "ancestor_mask has no words"),
        (33, (33, 1), "1 words of 32 bits for each row, expected a bit for each of the 33 rows"),
    ],
)
def test_masks_of_a_wrong_shape(
    attention: Any, make_layer: Any, make_world: Any, rows: int, shape: tuple[int, int], message: str
) -> None:
    world = make_world(make_layer(trees=True), [rows])
    step = world.step([(0, 0, rows)]) | {"ancestor_mask": np.zeros(shape, np.int32)}
    with pytest.raises(Exception, match=message):
        attention(world.layer).run(step, world.caches())


def test_a_tree_has_at_most_64_rows(attention: Any, make_layer: Any, make_world: Any) -> None:
    tree = [*range(-1, 63), 5]
    world = world_of(make_world, make_layer(trees=True), [0], [tree], seed=0)
    message = "row 64 .* descends from row 5, expected the row before it: of the sequence's 65 rows .* 64"
    with pytest.raises(Exception, match=message):
        attention(world.layer).run(tree_step(world, [0], [tree]), world.caches())
