"""How large the KV cache is: blocks of tokens, divided between groups of layers with the same window.

Layers with full attention keep every token of a sequence, layers with a window only what their window and
the current step need. So each group has blocks of its own, and memory is divided by what sequences of the
context's length hold in each.
"""

from dataclasses import dataclass

from pagelet.models.cache import group_bytes_per_token
from pagelet.models.errors import CapacityError
from pagelet.models.spec import ModelSpec


@dataclass(frozen=True)
class GroupLayout:
    """The blocks of the layers with one window.

    Attributes:
        window: tokens that a row attends to, itself included; 0: all.
        num_blocks: blocks of this group.
        block_bytes: of one block over all layers of the group.
    """

    window: int
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of a cache, fixed when it is allocated.

    Attributes:
        block_size: tokens of a block.
        groups: one for each distinct window, full attention first.
        max_step_tokens: tokens of one step that the groups with a window have room for.
    """

    block_size: int
    groups: tuple[GroupLayout, ...]
    max_step_tokens: int

    @property
    def num_blocks(self) -> int:
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_bytes(self) -> int:
        return sum(group.num_blocks * group.block_bytes for group in self.groups)

    def max_tokens(self, context: int) -> int:
        """Tokens, at most `context`, that one sequence can have read when it has the cache for itself."""
        limits = [
            group.num_blocks * self.block_size
            for group in self.groups
            if group.num_blocks < blocks_at_most(group.window, context, self.block_size, self.max_step_tokens)
        ]
        return min([context, *limits])


@dataclass(frozen=True)
class CacheShape:
    """What a cache would consist of, before its size is known.

    Attributes:
        block_size: tokens of a block.
        groups: (window, bytes of a block over the group's layers) of each group.
        max_step_tokens: tokens of one step.
    """

    block_size: int
    groups: tuple[tuple[int, int], ...]
    max_step_tokens: int

    @classmethod
    def of(cls, spec: ModelSpec, type_name: str, block_size: int, max_step_tokens: int) -> "CacheShape":
        """Of a model and a cache type.

        Raises:
            UnsupportedError: the type is not known.
        """
        sizes = zip(spec.window_groups, group_bytes_per_token(spec, type_name), strict=True)
        return cls(block_size, tuple((window, block_size * size) for window, size in sizes), max_step_tokens)

    def sequence_blocks(self, num_tokens: int) -> list[int]:
        """Blocks of each group with which one sequence of `num_tokens` can be read."""
        return [
            blocks_at_most(window, num_tokens, self.block_size, self.max_step_tokens)
            for window, _ in self.groups
        ]

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of `sequence_blocks`."""
        return self._bytes(self.sequence_blocks(num_tokens))

    def layout(self, num_bytes: int, context: int) -> CacheLayout:
        """The most blocks that fit into `num_bytes`, for sequences of `context` tokens.

        A cache that is too small for one such sequence is made for the longest one that it can hold.

        Raises:
            CapacityError: not even one block in each group fits.
        """
        longest = self.longest_sequence(num_bytes, context)
        if not longest:
            raise CapacityError(
                f"{num_bytes} bytes are given to the KV cache, but one block of {self.block_size} tokens "
                f"takes {self._bytes([1] * len(self.groups))}. Raise kv_memory."
            )
        blocks = self.sequence_blocks(longest)
        # What is left goes to further sequences that decode; a step's tokens are needed once for all.
        decoding = [blocks_at_most(window, longest, self.block_size, 1) for window, _ in self.groups]
        rest, each = num_bytes - self._bytes(blocks), self._bytes(decoding)
        blocks = [first + rest * more // each for first, more in zip(blocks, decoding, strict=True)]
        groups = zip(self.groups, blocks, strict=True)
        return CacheLayout(
            self.block_size,
            tuple(GroupLayout(window, count, size) for (window, size), count in groups),
            self.max_step_tokens,
        )

    def longest_sequence(self, num_bytes: int, context: int) -> int:
        """Tokens, at most `context`, of the longest sequence whose blocks fit; by bisection."""
        low, high = 0, -(-context // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.sequence_bytes(middle * self.block_size) <= num_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(context, low * self.block_size)

    def _bytes(self, blocks: list[int]) -> int:
        return sum(count * size for count, (_, size) in zip(blocks, self.groups, strict=True))


def blocks_at_most(window: int, num_tokens: int, block_size: int, step_tokens: int) -> int:
    """Blocks that a sequence of `num_tokens` ever holds at once, read by up to `step_tokens` per step.

    With a window a step holds its tokens, the window - 1 before them, and one more, so that the last token of
    the step before can be read again. These may begin anywhere in a block.
    """
    whole = -(-num_tokens // block_size)
    if not window:
        return whole
    return min(whole, -(-(window + step_tokens - 1) // block_size) + 1)
