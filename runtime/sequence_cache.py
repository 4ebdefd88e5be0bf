"""What one sequence has in the KV cache: a block table in each group of layers, over the same tokens."""

from collections.abc import Callable, Sequence

from pagelet.runtime.block_table import BlockTable
from pagelet.runtime.prefix_cache import KeyChain, Prefix, cached_prefix

# (group, block to copy from, block to copy into)
OnCopy = Callable[[int, int, int], None]


class SequenceCache:
    """The blocks of one sequence, from the first token on.

    Who owns which tokens: the first `committed` are in the cache for good, accepted, and their full blocks
    published; those up to `length` have slots and are written by the current step. `truncate` takes slots
    back, for drafted tokens that were not accepted.
    """

    def __init__(
        self, tables: tuple[BlockTable, ...], block_size: int, *, keys: KeyChain | None, on_copy: OnCopy
    ) -> None:
        """`keys` is None for a sequence that neither finds nor publishes blocks."""
        self.tables = tables
        self.keys = keys
        self.length = 0
        self.committed = 0
        self._block_size = block_size
        self._on_copy = on_copy
        self._windowed = [table for table in tables if table.window]

    def missing(self, num_tokens: int) -> list[int]:
        """Blocks of each group that `append(num_tokens)` would take."""
        return [table.missing(self.length, self.length + num_tokens) for table in self.tables]

    def append(self, num_tokens: int) -> bool:
        """Make slots for `num_tokens` more; False, and nothing changed, where a pool has too few blocks."""
        missing = self.missing(num_tokens)
        if any(missing):  # most steps go on in blocks that are there
            if any(map(_exceeds, missing, self.tables)):
                return False
            for group, table in enumerate(self.tables):
                copy = table.extend(self.length, self.length + num_tokens) if missing[group] else None
                if copy:
                    self._on_copy(group, *copy)
        self.length += num_tokens
        return True

    def commit(self, tokens: Sequence[int]) -> None:
        """The step is done and `tokens[:length]` are accepted: publish full blocks, let the windows slide."""
        full = self.length // self._block_size
        if self.keys is not None:
            for logical in range(self.committed // self._block_size, full):
                key = self.keys.upto(tokens, full)[logical]
                for table in self.tables:
                    table.publish(logical, key)
        self.committed = self.length
        for table in self._windowed:
            # One token back: another sample or a fork begins by reading the last token again.
            table.slide(max(0, self.length - 1))

    def truncate(self, length: int) -> None:
        """Take back the slots of the tokens behind `length`, none of them committed."""
        assert self.committed <= length <= self.length, (
            f"truncate to {length}, between {self.committed} committed and {self.length} tokens"
        )
        for table in self.tables:
            table.truncate(length)
        if self.keys is not None:
            self.keys.keep(length // self._block_size)
        self.length = length

    def free(self) -> None:
        """Give every block back; published ones can be found again."""
        for table in self.tables:
            table.free()
        self.length = self.committed = 0

    def cached_prefix(self, tokens: Sequence[int]) -> Prefix:
        """The longest beginning of `tokens` that is published, without the last token.

        The last token is read in any case, since its logits are wanted. Its block stays the sequence's own:
        a prefix ends where a block does, so nothing is written into a block that others read.
        """
        full = 0 if self.keys is None else (len(tokens) - 1) // self._block_size
        keys = self.keys.upto(tokens, full)[:full] if self.keys is not None else []
        return cached_prefix(self.tables, keys, self._block_size)

    def shared_prefix(self, length: int) -> Prefix | None:
        """The first `length` tokens, for another sequence; None where a window has left them behind."""
        if length > self.committed:
            return None
        firsts = tuple(table.first_needed(length) for table in self.tables)
        if any(table.first > first for table, first in zip(self.tables, firsts, strict=True)):
            return None
        end = -(-length // self._block_size)
        blocks = (table.blocks[first:end].tolist() for table, first in zip(self.tables, firsts, strict=True))
        return Prefix(length, firsts, tuple(blocks))

    def adopt(self, prefix: Prefix) -> None:
        """Begin with a prefix that is in the cache already, sharing its blocks."""
        for table, first, blocks in zip(self.tables, prefix.firsts, prefix.blocks, strict=True):
            table.adopt(first, blocks)
        self.length = self.committed = prefix.length

    def check_integrity(self) -> None:
        """Assert that every table maps what the tokens need, and nothing else."""
        assert 0 <= self.committed <= self.length, "tokens are committed that have no slot"
        for table in self.tables:
            table.check_integrity(self.length, self.committed)


def _exceeds(blocks: int, table: BlockTable) -> bool:
    return blocks > table.pool.num_available
