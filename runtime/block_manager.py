"""The block manager: the pools of all groups, the sequences that share them, what is still to be copied."""

from collections.abc import Iterable

from pagelet.runtime.block_pool import BlockPool
from pagelet.runtime.block_table import BlockTable
from pagelet.runtime.cache_layout import CacheLayout, blocks_at_most
from pagelet.runtime.prefix_cache import KeyChain, Prefix, root_key
from pagelet.runtime.sequence_cache import SequenceCache


class BlockManager:
    """Hands out caches over one layout, and knows whether there is room for them. Not thread-safe.

    Attributes:
        peak_blocks_used: the most blocks that were in use after a step was planned.
    """

    def __init__(
        self, layout: CacheLayout, context: int, *, fingerprint: str = "", prefix_cache: bool = True
    ) -> None:
        """For sequences of up to `context` tokens; `fingerprint` names the model and the cache's type."""
        self.layout = layout
        self.block_size = layout.block_size
        self.max_blocks = -(-context // layout.block_size)
        self.pools = tuple(BlockPool(group.num_blocks) for group in layout.groups)
        self.peak_blocks_used = 0
        self._fingerprint = fingerprint
        self._prefix_cache = prefix_cache
        self._copies: list[tuple[int, int, int]] = []

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached for pool in self.pools)

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_shared(self) -> int:
        return sum(pool.num_shared for pool in self.pools)

    @property
    def num_evicted(self) -> int:
        return sum(pool.num_evicted for pool in self.pools)

    def new_cache(self, *, salt: str | None = None, prefix_cache: bool = True) -> SequenceCache:
        """An empty cache. Only those with the same salt find each other's blocks; without
        `prefix_cache` it neither finds nor publishes any. May be called by any thread."""
        groups = zip(self.layout.groups, self.pools, strict=True)
        keys = None
        if prefix_cache and self._prefix_cache:
            keys = KeyChain(root_key(self._fingerprint, salt), self.block_size)
        return SequenceCache(
            tuple(BlockTable(pool, group.window, self.block_size, self.max_blocks) for group, pool in groups),
            self.block_size,
            keys=keys,
            on_copy=self._add_copy,
        )

    def owns(self, cache: SequenceCache) -> bool:
        """Whether the cache came from here."""
        return cache.tables[0].pool is self.pools[0]

    def demand(self, cache: SequenceCache, num_tokens: int) -> list[int]:
        """Blocks of each group that a sequence still takes until it has read `num_tokens` in all."""
        need = self._at_most(num_tokens, num_tokens - cache.length)
        held = (table.end - table.first for table in cache.tables)
        return [max(0, whole - mine) for whole, mine in zip(need, held, strict=True)]

    def demand_after(self, prefix: Prefix, num_tokens: int) -> list[int]:
        """Available blocks of each group that a sequence takes until it has read `num_tokens` in all, if it
        begins with `prefix`: blocks that nobody used, and new ones; a partly filled one is copied."""
        copied = prefix.length % self.block_size > 0
        need = self._at_most(num_tokens, num_tokens - prefix.length)
        return [
            max(0, whole - len(blocks) + copied) + prefix.num_unused(group, pool)
            for group, (whole, blocks, pool) in enumerate(zip(need, prefix.blocks, self.pools, strict=True))
        ]

    @property
    def room(self) -> list[int]:
        """Available blocks of each group."""
        return [pool.num_available for pool in self.pools]

    def has_room(self, demand: Iterable[int]) -> bool:
        """Whether so many blocks of each group are available."""
        return all(blocks <= available for blocks, available in zip(demand, self.room, strict=True))

    def take_copies(self) -> dict[int, list[tuple[int, int]]]:
        """The copies (from, to) of each group that the backend must make, in order, before the next step."""
        copies: dict[int, list[tuple[int, int]]] = {}
        for group, source, target in self._copies:
            copies.setdefault(group, []).append((source, target))
        self._copies.clear()
        return copies

    def note_peak(self) -> None:
        """Called when a step's blocks are taken."""
        self.peak_blocks_used = max(self.peak_blocks_used, self.num_used)

    def live_slots(self, caches: Iterable[SequenceCache]) -> int:
        """Slots that hold a token which a sequence may attend to; shared blocks count once.

        Over `num_used` times the block size this is the share of the memory in use that is not wasted.
        """
        dead: dict[tuple[int, int, int], int] = {}
        for cache in caches:
            for group, table in enumerate(cache.tables):
                if table.first == table.end:
                    continue
                for edge, slots in enumerate(table.dead_slots(cache.committed)):
                    key = group, edge, int(table.blocks[table.end - 1 if edge else table.first])
                    dead[key] = min(slots, dead.get(key, slots))
        return max(0, self.num_used * self.block_size - sum(dead.values()))

    def check_integrity(self, caches: Iterable[SequenceCache]) -> None:
        """Assert that every block of every group is free, cached or used, and counted right.

        `caches` are all those that hold blocks.
        """
        caches = list(caches)
        for cache in caches:
            cache.check_integrity()
        for group, pool in enumerate(self.pools):
            pool.check_integrity(block for cache in caches for block in cache.tables[group].mapped())

    def _at_most(self, num_tokens: int, unread: int) -> list[int]:
        """Blocks of each group that a sequence of `num_tokens` holds at once while it reads the last ones."""
        step = max(1, min(unread, self.layout.max_step_tokens))
        return [
            blocks_at_most(group.window, num_tokens, self.block_size, step) for group in self.layout.groups
        ]

    def _add_copy(self, group: int, source: int, target: int) -> None:
        self._copies.append((group, source, target))
