"""From the shapes of a step to its kernel launches: grids, arguments, and places in the workspace.

Everything follows from shapes, which the host knows; lengths stay on the device. So the same shapes always
give the same launches, and a CUDA graph of them can be replayed for other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pagelet.plugins.kernels.variant import (
    HEADS_PER_PROGRAM,
    MAX_SPLITS,
    AttentionVariant,
    KernelSpec,
    tile_of,
)

ALIGNMENT = 256  # bytes, of each piece of the workspace; what cudaMalloc gives
DECODE_ROWS = 8  # rows per sequence up to which a step is split over keys instead of rows
PROGRAMS = 512  # that a split step aims at: a few for each multiprocessor of most GPUs
KEYS_PER_SPLIT = 256  # at least, if the table were full: shorter parts cost more to merge than they save


@dataclass(frozen=True)
class Shapes:
    """What the host knows of a step.

    Attributes:
        tokens: rows of ``query``.
        sequences: rows of ``block_table``.
        table_width: its columns.
        mask_rows, mask_words: the shape of ``ancestor_mask``; no rows where no tree is verified.
    """

    tokens: int
    sequences: int
    table_width: int
    mask_rows: int = 0
    mask_words: int = 0


@dataclass(frozen=True)
class Workspace:
    """A pointer into the workspace, in bytes from its begin."""

    offset: int


@dataclass(frozen=True)
class Offset:
    """A pointer into a tensor, in bytes from its begin."""

    name: str
    bytes: int


Argument = str | int | Workspace | Offset


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: what is launched.
        grid: of programs.
        arguments: in the kernel's order. A string names one of the node's tensors, and is a null pointer if
            the node has none of this name; a number is a 32 bit integer.
    """

    kernel: KernelSpec
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class _Layout:
    """Where things lie in the workspace, in bytes."""

    partial_output: int
    partial_max: int
    partial_sum: int
    end: int


@lru_cache(maxsize=4096)
def plan(variant: AttentionVariant, shapes: Shapes) -> tuple[Launch, ...]:
    """The launches of a node's step, in order, on one stream; none if there are no rows."""
    if shapes.tokens == 0 or shapes.sequences == 0:
        return ()
    decode = shapes.tokens <= DECODE_ROWS * shapes.sequences
    role = ("decode" if decode else "prefill") + ("_tree" if shapes.mask_rows else "")
    tiles = _tiles(variant, shapes, role)
    splits = _splits(variant, shapes, tiles) if decode else 0
    layout = _layout(variant, shapes.tokens, shapes.tokens * splits)
    values: dict[str, Argument] = {
        "prepared_query": Workspace(0),
        "tokens": shapes.tokens,
        "sequences": shapes.sequences,
        "table_width": shapes.table_width,
        "mask_words": shapes.mask_words,
        "splits": splits,
    }
    if decode:
        values["partial_output"] = Workspace(layout.partial_output)
        values["partial_max"] = Workspace(layout.partial_max)
        values["partial_sum"] = Workspace(layout.partial_sum)
    if variant.writes and variant.packed:  # one row: queries, keys, values
        size = 2 * variant.head_dim
        values["key"] = Offset("query", variant.num_heads * size)
        values["value"] = Offset("query", (variant.num_heads + variant.kv_num_heads) * size)

    def launch(role: str, *grid: int) -> Launch:
        kernel, (x, y, z) = variant.kernel(role), grid
        return Launch(kernel, (x, y, z), tuple(values.get(name, name) for name, _ in kernel.arguments))

    groups = -(-variant.num_heads // HEADS_PER_PROGRAM)
    groups += 2 * -(-variant.kv_num_heads // HEADS_PER_PROGRAM) if variant.writes else 0
    launches = [
        launch("prepare", shapes.tokens, groups, 1),
        launch(role, tiles, variant.kv_num_heads, max(splits, 1)),
    ]
    return (*launches, launch("merge", shapes.tokens, variant.num_heads, 1)) if decode else tuple(launches)


def workspace_bytes(variant: AttentionVariant, max_tokens: int, max_sequences: int, table_width: int) -> int:
    """Bytes that suffice for every step with at most so many tokens, sequences and table columns."""
    split_tokens = min(max_tokens, DECODE_ROWS * max_sequences)
    # A step of n rows has at least n / tokens per tile tiles, so n × splits is bounded for all n at once.
    tokens_per_tile = tile_of(variant, "decode").rows // variant.group
    most = max(1, PROGRAMS // variant.kv_num_heads) * tokens_per_tile
    partial_rows = min(max(split_tokens, most), split_tokens * _most_splits(variant, table_width))
    return _layout(variant, max_tokens, partial_rows).end


def _tiles(variant: AttentionVariant, shapes: Shapes, role: str) -> int:
    """Tiles of rows: a sequence that begins at row ``b`` has its first at ``b // tokens per tile + s``.

    So each sequence has room for all its rows, whatever the lengths (as in vLLM's unified Triton kernel).
    """
    tokens_per_tile = tile_of(variant, role).rows // variant.group
    return shapes.tokens // tokens_per_tile + shapes.sequences


def _splits(variant: AttentionVariant, shapes: Shapes, tiles: int) -> int:
    programs = tiles * variant.kv_num_heads
    return min(max(1, PROGRAMS // programs), _most_splits(variant, shapes.table_width))


def _most_splits(variant: AttentionVariant, table_width: int) -> int:
    keys = table_width * variant.block_size
    if variant.local_window_size > 0:
        keys = min(keys, variant.local_window_size)
    return min(MAX_SPLITS, max(1, keys // KEYS_PER_SPLIT))


def _layout(variant: AttentionVariant, tokens: int, partial_rows: int) -> _Layout:
    """For `tokens` rows of queries, and so many rows of partial results."""
    ends = [0]
    row, heads = variant.num_heads * variant.head_dim, variant.num_heads
    for size in (
        2 * tokens * row,
        4 * partial_rows * row,
        4 * partial_rows * heads,
        4 * partial_rows * heads,
    ):
        ends.append(-(-(ends[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return _Layout(*ends[1:])
