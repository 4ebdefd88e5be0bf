"""A sequence's cached blocks as bytes, out of the cache and into it. The step thread calls, between steps."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagelet.runtime.backends.base import Backend, ByteArray
from pagelet.runtime.block_manager import BlockManager
from pagelet.runtime.block_pool import Key
from pagelet.runtime.block_table import BlockTable
from pagelet.runtime.sequence_cache import SequenceCache


def read_blocks(
    cache: SequenceCache, tokens: Sequence[int], backend: Backend
) -> tuple[int, tuple[ByteArray, ...]]:
    """What a request with `tokens` would find: how many tokens, and the blocks of each group for them.

    `cache` is an empty one, whose salt is the sequence's.
    """
    prefix = cache.cached_prefix(tokens)
    data = (backend.read_blocks(group, blocks) for group, blocks in enumerate(prefix.blocks))
    return prefix.length, tuple(data)


def restore_blocks(
    manager: BlockManager,
    cache: SequenceCache,
    tokens: Sequence[int],
    saved: tuple[ByteArray, ...],
    backend: Backend,
) -> int:
    """Publish the blocks of `tokens`, whole blocks in number; returns the tokens that can be found then.

    What is there already stays; what has no room among the available blocks is dropped from the end.
    `saved` are the blocks of each group, from the first one that the full length needs, or fewer.
    """
    if cache.keys is None:
        return 0
    size = manager.block_size
    count = len(tokens) // size
    keys = cache.keys.upto(tokens, count)[:count]
    firsts = [table.first_needed(count * size) for table in cache.tables]
    spans = [range(first, first + len(data)) for first, data in zip(firsts, saved, strict=True)]
    fitting = _fitting(cache.tables, keys, spans, size)
    for group, (table, span) in enumerate(zip(cache.tables, spans, strict=True)):
        needed = range(table.first_needed(fitting * size), fitting)
        missing = _hold(table, needed, keys)
        try:
            rows = [saved[group][index - span.start] for index in missing]
            backend.write_blocks(group, [int(table.blocks[index]) for index in missing], rows)
            for index in missing:
                table.publish(index, keys[index])
        finally:
            table.free()
    return fitting * size


def _fitting(
    tables: Sequence[BlockTable], keys: Sequence[Key], spans: Sequence[range], block_size: int
) -> int:
    """Blocks of the longest prefix that is saved or cached in all groups, and has room."""
    ends = np.arange(len(keys) + 1)
    fits = np.ones(len(keys) + 1, np.bool_)
    for table, span in zip(tables, spans, strict=True):
        pool = table.pool
        found = [pool.find(key) for key in keys]
        taken = _sums([block is None or pool.is_cached(block) for block in found])
        lost = _sums([block is None and index not in span for index, block in enumerate(found)])
        starts = np.array([table.first_needed(end * block_size) for end in ends.tolist()])
        fits[len(table.blocks) + 1 :] = False
        fits &= (taken[ends] - taken[starts] <= pool.num_available) & (lost[ends] == lost[starts])
    return int(np.flatnonzero(fits)[-1])


def _hold(table: BlockTable, needed: range, keys: Sequence[Key]) -> list[int]:
    """Map the blocks of the empty table: those that are cached, then new ones for the others, which it
    returns. In this order, since a new one may take the place of a cached block that nobody holds."""
    found = {index: table.pool.find(keys[index]) for index in needed}
    for block in found.values():
        if block is not None:
            table.pool.share(block)
    held = [table.pool.allocate() if block is None else block for block in found.values()]
    table.first, table.end = needed.start, needed.stop
    table.blocks[needed.start : needed.stop] = held
    return [index for index, block in found.items() if block is None]


def _sums(flags: list[bool]) -> NDArray[np.int64]:
    """How many of the first n are set, for each n."""
    return np.cumsum([False, *flags], dtype=np.int64)
