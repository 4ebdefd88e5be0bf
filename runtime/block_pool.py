"""The block pool: who owns which block of the paged KV cache, and which blocks can be found again.

A block holds the keys and values of `block_size` consecutive tokens, in every layer of its group. The pool
knows block numbers, reference counts and keys only; the memory itself belongs to the backend. Not
thread-safe: the step loop owns it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

# Names the tokens of a block and all before them: see `prefix_cache`.
Key = bytes


class BlockPool:
    """A fixed number of blocks; every operation is O(1) per block.

    Ownership: a block is exactly one of
    - free: on the free list, count 0, no key;
    - cached: count 0, with a key, in the order in which their last references went;
    - used: in `count` block tables, with a key once it is published.

    Cached blocks are available: `allocate` takes free blocks first, then evicts the cached block that went
    unused longest. A table gives its blocks back from the last to the first, and holds a block's
    predecessors as long as the block, so with full attention no block is evicted before its successors.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        # A stack: the block that was freed last is the warmest in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._blocks: dict[Key, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_shared(self) -> int:
        """Blocks in more than one table."""
        return sum(count > 1 for count in self._references)

    def allocate(self) -> int:
        """Take an available block, with one reference. There must be one: see `num_available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.num_evicted += 1
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if not self._references[block]:
            assert self._keys[block] is not None, f"block {block} is free and cannot be shared"
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Give one reference back; with the last one the block becomes cached if it has a key, else free."""
        assert self._references[block] > 0, f"block {block} is freed twice"
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def publish(self, block: int, key: Key) -> int:
        """Let `find` give out a used block, whose contents never change from here on.

        Where another block has the key already, the two hold the same values: the caller's reference moves
        to that one. Returns the block to use.
        """
        found = self._blocks.get(key)
        if found is None:
            assert self._references[block] > 0, f"block {block} is not in use and cannot be published"
            assert self._keys[block] is None, f"block {block} is published under two keys"
            self._blocks[key], self._keys[block] = block, key
            return block
        if found != block:
            self.share(found)
            self.release(block)
        return found

    def find(self, key: Key) -> int | None:
        """The published block, used or cached, with this key."""
        return self._blocks.get(key)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def is_writable(self, block: int) -> bool:
        """Whether the only table that holds the block may write into it."""
        return self._references[block] == 1 and self._keys[block] is None

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._blocks[key]
        self._keys[block] = None

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that free, cached and used blocks partition the pool, and that every count and key is right.

        `held` are the blocks of all tables, each as often as tables hold it.
        """
        counts = Counter(held)
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert free.isdisjoint(counts), f"blocks {sorted(free & counts.keys())} are both free and in a table"
        assert cached.isdisjoint(counts), "a block is both cached and in a table"
        assert free.isdisjoint(cached), "a block is both free and cached"
        assert len(free) + len(cached) + len(counts) == self.num_blocks, (
            "a block is neither free nor cached nor in a table"
        )
        for block, count in enumerate(self._references):
            assert count == counts[block], (
                f"block {block} counts {count} references, tables hold {counts[block]}"
            )
        keyed = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert keyed == self._blocks, "the index and the blocks' keys differ"
        assert cached <= set(keyed.values()), "a cached block has no key"
        assert free.isdisjoint(keyed.values()), "a free block has a key"
