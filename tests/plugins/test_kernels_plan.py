"""What kernels a node needs, and how a step launches them: plain Python, no GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagelet.plugins.kernels.launch_plan import ALIGNMENT, Offset, Shapes, Workspace, plan, workspace_bytes
from pagelet.plugins.kernels.variant import MAX_SPLITS, AttentionVariant

PLAIN = AttentionVariant(num_heads=8, kv_num_heads=2, head_dim=64, block_size=32)
ROLES = ["prepare", "prefill", "prefill_tree", "decode", "decode_tree", "merge"]
NODE = {
    "inputs": "query key value key_cache value_cache cumulative_sequence_length past_seqlens block_table "
    "cos_cache sin_cache key_scale_cache value_scale_cache position_ids ancestor_mask "
    "k_norm_weight head_sink",
    "num_heads": 8,
    "kv_num_heads": 2,
    "head_dim": 64,
    "block_size": 32,
    "activation": "bf16",
    "cache": "fp8",
    "scale": 0.1,
    "softcap": 30.0,
    "local_window_size": 512,
    "rotary_dim": 32,
    "rotary_interleaved": 1,
    "norm_epsilon": 1e-5,
    "norm_after_rotation": 1,
    "norm_values": 1,
    "writes": 1,
}


@st.composite
def variants(draw: st.DrawFn) -> AttentionVariant:
    kv_heads = draw(st.integers(1, 16))
    return AttentionVariant(
        num_heads=kv_heads * draw(st.integers(1, 16)),
        kv_num_heads=kv_heads,
        head_dim=16 * draw(st.integers(1, 32)),
        block_size=draw(st.sampled_from([1, 16, 32, 64, 256])),
        local_window_size=draw(st.sampled_from([-1, 0, 512, 4096])),
        writes=draw(st.booleans()),
    )


def test_a_node_says_what_its_variant_is() -> None:
    variant = AttentionVariant.of_node(NODE)
    assert variant == AttentionVariant(
        num_heads=8,
        kv_num_heads=2,
        head_dim=64,
        block_size=32,
        activation="bf16",
        cache="fp8",
        scale=0.1,
        softcap=30.0,
        local_window_size=512,
        rotary_dim=32,
        rotary_interleaved=True,
        norm_epsilon=1e-5,
        norm_after_rotation=True,
        norm_values=True,
        writes=True,
        packed=False,
        q_norm=False,
        k_norm=True,
        sinks=True,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "f32"}, "activation 'f32' has no kernel; known: f16, bf16"),
        ({"cache": "f32"}, "cache 'f32' has no kernel; known: f16, int8, fp8"),
        ({"num_heads": 7}, "7 heads and 2 KV heads, expected a multiple"),
        ({"kv_num_heads": 0}, "8 heads and 0 KV heads"),
        ({"num_heads": 34}, "17 query heads share a KV head, expected at most 16"),
        ({"head_dim": 72}, "72 elements, expected a multiple of 16"),
        ({"head_dim": 528}, "528 elements, .* at most 512"),
        ({"block_size": 0}, "blocks have 0 tokens"),
        ({"rotary_dim": 66}, "66 elements are rotated, expected an even number, at most 64"),
        ({"rotary_dim": 3}, "3 elements are rotated"),
    ],
)
def test_what_has_no_kernel(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes)


def test_kernels_have_the_roles_that_plans_name() -> None:
    assert [kernel.role for kernel in PLAIN.kernels()] == ROLES


def test_kernels_share_keys_exactly_if_nothing_differs() -> None:
    keys = {kernel.role: kernel.key for kernel in PLAIN.kernels()}
    assert len(set(keys.values())) == len(keys)
    for changes, same in (
        ({"scale": 0.125}, set(ROLES)),  # what no scale means here
        ({"norm_epsilon": 1e-6 * (1 + 1e-12)}, set(ROLES)),  # the same float32
        ({"local_window_size": 64}, {"prepare", "merge"}),
        ({"cache": "int8"}, {"merge"}),
        ({"rotary_dim": 64}, set(ROLES) - {"prepare"}),
        ({"sinks": True}, {"prepare", "decode", "decode_tree"}),
    ):
        others = {kernel.role: kernel.key for kernel in replace(PLAIN, **changes).kernels()}
        assert {role for role in ROLES if keys[role] == others[role]} == same, changes


@pytest.mark.parametrize(
    ("shapes", "roles"),
    [
        (Shapes(8, 1, 4), ["prepare", "decode", "merge"]),
        (Shapes(9, 1, 4), ["prepare", "prefill"]),
        (Shapes(5, 1, 4, 5, 1), ["prepare", "decode_tree", "merge"]),
        (Shapes(64, 1, 4, 64, 2), ["prepare", "prefill_tree"]),
        (Shapes(0, 1, 4), []),
        (Shapes(0, 0, 4), []),
    ],
)
def test_what_is_launched_follows_from_shapes(shapes: Shapes, roles: list[str]) -> None:
    assert [launch.kernel.role for launch in plan(PLAIN, shapes)] == roles


def test_arguments_are_tensors_offsets_and_numbers() -> None:
    prepare, decode, merge = plan(PLAIN, Shapes(2, 1, 100))
    given = dict(zip([name for name, _ in prepare.kernel.arguments], prepare.arguments, strict=True))
    assert given["query"] == "query"
    assert given["key"] == Offset("query", 8 * 64 * 2)
    assert given["value"] == Offset("query", 10 * 64 * 2)
    assert given["table_width"] == 100
    assert prepare.grid == (2, 3, 1)  # eight heads a program: queries, keys, values
    assert decode.grid == (1, 2, 12)  # one tile holds both tokens; 3200 keys in parts of 256 at least
    assert merge.grid == (2, 8, 1)
    reader = plan(replace(PLAIN, writes=False), Shapes(2, 1, 100))[0]
    assert reader.grid == (2, 1, 1)
    apart = plan(replace(PLAIN, packed=False), Shapes(2, 1, 100))[0]
    assert apart.arguments[:3] == ("query", "key", "value")


@given(variants(), st.integers(1, 600), st.integers(1, 40), st.integers(1, 300), st.booleans())
def test_workspace_holds_every_smaller_step(
    variant: AttentionVariant, tokens: int, sequences: int, width: int, tree: bool
) -> None:
    size = workspace_bytes(variant, tokens, sequences, width)
    for part in (1, 2, 3, 7):
        shapes = Shapes(-(-tokens // part), -(-sequences // part), -(-width // part), int(tree), int(tree))
        for launch in plan(variant, shapes):
            for extent in extents(variant, shapes, launch):
                assert extent <= size
            assert all(extent > 0 for extent in launch.grid)


def extents(variant: AttentionVariant, shapes: Shapes, launch: Any) -> list[int]:
    """Where each piece of the workspace that a launch uses ends; pieces are aligned and do not overlap."""
    rows = shapes.tokens * variant.num_heads
    splits = launch.grid[2] if launch.kernel.role.startswith("decode") else 0
    if launch.kernel.role == "merge":
        splits = launch.arguments[-1]
        assert 1 <= splits <= MAX_SPLITS
    sizes = {
        "prepared_query": 2 * rows * variant.head_dim,
        "partial_output": 4 * splits * rows * variant.head_dim,
        "partial_max": 4 * splits * rows,
        "partial_sum": 4 * splits * rows,
    }
    pieces = sorted(
        (argument.offset, argument.offset + sizes[name])
        for (name, _), argument in zip(launch.kernel.arguments, launch.arguments, strict=True)
        if isinstance(argument, Workspace)
    )
    assert pieces
    for (begin, end), (following, _) in zip(pieces, [*pieces[1:], (1 << 62, 0)], strict=True):
        assert begin % ALIGNMENT == 0
        assert end <= following
    return [end for _, end in pieces]


def test_plans_need_no_triton() -> None:
    code = "import sys, pagelet.plugins.kernels.launch_plan; print({'triton', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
