"""Finding a prompt's beginning in the cache: the keys of full blocks, and the longest run of them.

A block's key is a hash of its tokens and of its predecessor's key, and the first one's predecessor is a root
made of everything else that changes the values (Kwon et al. 2023, section 4.4; the chain as in vLLM). So
equal keys mean equal contents: BLAKE2b leaves no way to make two prompts collide.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from pagelet.runtime.block_pool import BlockPool, Key
from pagelet.runtime.block_table import BlockTable

KEY_BYTES = 32


class KeyChain:
    """The keys of one sequence's full blocks, each hashed once, when it is first asked for."""

    def __init__(self, root: Key, block_size: int) -> None:
        self._block_size = block_size
        self._root = root
        self._keys: list[Key] = []

    def upto(self, tokens: Sequence[int], num_blocks: int) -> list[Key]:
        """At least the first `num_blocks` keys; `tokens` only grows from one call to the next, see `keep`."""
        for index in range(len(self._keys), num_blocks):
            begin = index * self._block_size
            block = array("q", tokens[begin : begin + self._block_size])
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(blake2b(parent + block.tobytes(), digest_size=KEY_BYTES).digest())
        return self._keys

    def keep(self, num_blocks: int) -> None:
        """Forget the keys after the first `num_blocks`: other tokens may come there."""
        del self._keys[num_blocks:]


def root_key(fingerprint: str, salt: str | None) -> Key:
    """Where a chain begins; `fingerprint` names the model and the cache's type.

    A salt has a hash of its own, so that no choice of it looks like another model, or like none.
    """
    model = blake2b(fingerprint.encode(), digest_size=KEY_BYTES).digest()
    if salt is None:
        return model
    return blake2b(model + salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True)
class Prefix:
    """What a sequence can take over instead of reading it: its first `length` tokens.

    Attributes:
        firsts: of each group, the first logical block that is needed.
        blocks: of each group, the physical blocks from there on.
    """

    length: int
    firsts: tuple[int, ...]
    blocks: tuple[list[int], ...]

    def num_unused(self, group: int, pool: BlockPool) -> int:
        """How many of a group's blocks no table holds: they count as available until they are taken over."""
        return sum(pool.is_cached(block) for block in self.blocks[group])


def cached_prefix(tables: Sequence[BlockTable], keys: Sequence[Key], block_size: int) -> Prefix:
    """The longest prefix of whole blocks after which the next row finds all that it attends to.

    Full attention needs every block, a window of W the blocks of the last W - 1 tokens: where one is missing
    the prefix shrinks to before it.
    """
    count = _longest(tables, keys, block_size)
    firsts = tuple(table.first_needed(count * block_size) for table in tables)
    blocks = []
    for table, first in zip(tables, firsts, strict=True):
        found = [table.pool.find(key) for key in keys[first:count]]
        blocks.append([block for block in found if block is not None])
    return Prefix(count * block_size, firsts, tuple(blocks))


def _longest(tables: Sequence[BlockTable], keys: Sequence[Key], block_size: int) -> int:
    """Blocks of the longest prefix."""
    count = len(keys)
    for table in tables:
        if not table.window:
            count = next((i for i in range(count) if table.pool.find(keys[i]) is None), count)
    windowed = [table for table in tables if table.window]
    while gaps := [gap for table in windowed if (gap := _last_gap(table, keys, count, block_size)) >= 0]:
        # Each length from `count` down to a gap would need the missing block too.
        count = min(gaps)
    return count


def _last_gap(table: BlockTable, keys: Sequence[Key], count: int, block_size: int) -> int:
    """The last block that a prefix of `count` blocks needs and that is not published; -1: none."""
    needed = range(table.first_needed(count * block_size), count)
    return next((index for index in reversed(needed) if table.pool.find(keys[index]) is None), -1)
