"""The block table of one sequence in one group of layers."""

import numpy as np
from numpy.typing import NDArray

from pagelet.runtime.block_pool import BlockPool

UNMAPPED = -1


class BlockTable:
    """Which block holds which tokens; logical blocks `first` to `end` are mapped.

    Attributes:
        blocks: int32 [max_blocks]; physical block of each logical block, UNMAPPED outside [first, end).
            Token p lives in slot `p % block_size` of logical block `p // block_size`.
        first: 0, or the first block that the window has not left behind.
    """

    def __init__(self, pool: BlockPool, window: int, block_size: int, max_blocks: int) -> None:
        self.pool = pool
        self.blocks: NDArray[np.int32] = np.full(max_blocks, UNMAPPED, np.int32)
        self.first = 0
        self.end = 0
        self.window = window
        self._block_size = block_size

    def missing(self, length: int, target: int) -> int:
        """Blocks to allocate, lest `extend(length, target)` fails."""
        return -(-target // self._block_size) - self.end + self._must_copy(length, target)

    def extend(self, length: int, target: int) -> tuple[int, int] | None:
        """Map blocks for the tokens `length` to `target`, which are about to be written.

        Returns (from, to) where the last block is shared or published and so was replaced by another, into
        which its contents are to be copied.
        """
        copy = None
        if self._must_copy(length, target):
            shared = int(self.blocks[self.end - 1])
            copy = shared, self.pool.allocate()
            self.blocks[self.end - 1] = copy[1]
            self.pool.release(shared)
        for logical in range(self.end, -(-target // self._block_size)):
            self.blocks[logical] = self.pool.allocate()
            self.end = logical + 1
        return copy

    def publish(self, logical: int, key: bytes) -> None:
        """Publish a mapped, full block, or go over to the published one with the same contents."""
        self.blocks[logical] = self.pool.publish(int(self.blocks[logical]), key)

    def first_needed(self, length: int) -> int:
        """First logical block that the row at position `length`, or any later one, attends to."""
        return max(0, length - self.window + 1) // self._block_size if self.window else 0

    def slide(self, length: int) -> None:
        """Give back what lies wholly behind the window of every row from position `length` on."""
        needed = min(self.first_needed(length), self.end)
        for logical in range(self.first, needed):
            self.pool.release(int(self.blocks[logical]))
            self.blocks[logical] = UNMAPPED
        self.first = max(self.first, needed)

    def truncate(self, length: int) -> None:
        """Keep the blocks of the first `length` tokens and give those behind them back, the last first."""
        keep = max(-(-length // self._block_size), self.first)
        for block in self.blocks[keep : self.end][::-1].tolist():
            self.pool.release(block)
        self.blocks[keep : self.end] = UNMAPPED
        self.end = keep

    def free(self) -> None:
        """Give every block back."""
        self.truncate(0)
        self.first = self.end = 0

    def adopt(self, first: int, blocks: list[int]) -> None:
        """Share `blocks` as the logical blocks from `first` on; the table must be empty."""
        assert not self.end, "only an empty table takes blocks over"
        for block in blocks:
            self.pool.share(block)
        self.first, self.end = first, first + len(blocks)
        self.blocks[self.first : self.end] = blocks

    def slot(self, position: int) -> int:
        """Where the token at a position is: block * block_size + offset."""
        return int(self.blocks[position // self._block_size]) * self._block_size + position % self._block_size

    def mapped(self) -> list[int]:
        """Physical blocks in logical order."""
        mapped: list[int] = self.blocks[self.first : self.end].tolist()
        return mapped

    def dead_slots(self, length: int) -> tuple[int, int]:
        """Slots before the window in the first block, and behind token `length` in the last one."""
        start = max(0, length - self.window + 1) if self.window else 0
        return max(0, start - self.first * self._block_size), self.end * self._block_size - length

    def check_integrity(self, length: int, committed: int) -> None:
        """Assert that the table maps exactly the blocks that its tokens need, each once."""
        mapped = self.mapped()
        assert self.end == -(-length // self._block_size), "a table maps too many or too few blocks"
        assert self.first <= self.first_needed(committed), "a block within the window was given back"
        assert len(set(mapped)) == len(mapped), "a table maps one block twice"
        assert all(0 <= block < self.pool.num_blocks for block in mapped), "a table maps a block out of range"
        outside = (self.blocks[: self.first], self.blocks[self.end :])
        assert all((part == UNMAPPED).all() for part in outside), "a table maps a block outside its range"

    def _must_copy(self, length: int, target: int) -> bool:
        """Whether the tokens would go into a block that others read."""
        if not length % self._block_size or target == length:
            return False
        return not self.pool.is_writable(int(self.blocks[self.end - 1]))
