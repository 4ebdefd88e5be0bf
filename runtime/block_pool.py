"""The block pool: who owns which slot of the paged KV cache.

A block holds the keys and values of `block_size` consecutive tokens, in every layer. The pool knows
block numbers and reference counts only; the memory itself belongs to the backend. Not thread-safe:
the step loop owns it.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

UNMAPPED = -1


class BlockPool:
    """A fixed number of blocks with reference counts; every operation is O(1) per block.

    Ownership: a block is either on the free list with count 0, or in `count` block tables.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block that was freed last is the warmest in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """Take a free block, with one reference. There must be one: see `num_free`."""
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block in use."""
        assert self._references[block] > 0, f"block {block} is free and cannot be shared"
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Give one reference back; the last one frees the block."""
        assert self._references[block] > 0, f"block {block} is freed twice"
        self._references[block] -= 1
        if not self._references[block]:
            self._free.append(block)

    def check_integrity(self, tables: Iterable["BlockTable"]) -> None:
        """Assert that free and used blocks partition the pool, given every table that uses it."""
        held: Counter[int] = Counter()
        for table in tables:
            table.check_integrity()
            held.update(table.mapped())
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert free.isdisjoint(held), f"blocks {sorted(free & held.keys())} are both free and in a table"
        assert len(free) + len(held) == self.num_blocks, "a block is neither free nor in a table"
        for block, count in enumerate(self._references):
            assert count == held[block], f"block {block} counts {count} references, tables hold {held[block]}"


class BlockTable:
    """The blocks of one sequence, and how many of its tokens they hold.

    Attributes:
        blocks: int32 [max_blocks]; physical block of each logical block, UNMAPPED beyond the last.
        length: tokens in the cache; token p lives in slot `p % block_size` of logical block
            `p // block_size`.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self.blocks: NDArray[np.int32] = np.full(max_blocks, UNMAPPED, np.int32)
        self.num_blocks = 0
        self.length = 0

    def missing_blocks(self, num_tokens: int) -> int:
        """Free blocks that `append(num_tokens)` would take."""
        return self._pool.blocks_for(self.length + num_tokens) - self.num_blocks

    def append(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` more; False, and nothing changed, where the pool has too few blocks."""
        missing = self.missing_blocks(num_tokens)
        if missing > self._pool.num_free:
            return False
        for _ in range(missing):
            self.blocks[self.num_blocks] = self._pool.allocate()
            self.num_blocks += 1
        self.length += num_tokens
        return True

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and give the blocks behind them back."""
        assert 0 <= length <= self.length, f"truncate to {length}, but the table holds {self.length}"
        keep = self._pool.blocks_for(length)
        for block in self.blocks[keep : self.num_blocks][::-1].tolist():
            self._pool.release(block)
        self.blocks[keep : self.num_blocks] = UNMAPPED
        self.num_blocks = keep
        self.length = length

    def free(self) -> None:
        """Give every block back."""
        self.truncate(0)

    def mapped(self) -> list[int]:
        """Physical blocks in logical order."""
        mapped: list[int] = self.blocks[: self.num_blocks].tolist()
        return mapped

    def check_integrity(self) -> None:
        """Assert that the table maps exactly the blocks that its tokens need, each once."""
        mapped = self.mapped()
        assert self.num_blocks == self._pool.blocks_for(self.length), (
            "a table maps too many or too few blocks"
        )
        assert len(set(mapped)) == len(mapped), "a table maps one block twice"
        assert all(0 <= block < self._pool.num_blocks for block in mapped), (
            "a table maps a block out of range"
        )
        assert (self.blocks[self.num_blocks :] == UNMAPPED).all(), "a table maps a block beyond its end"
