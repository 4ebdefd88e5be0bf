"""Random operations on many sequences, against a memory that remembers what was written where."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagelet.runtime.block_manager import BlockManager
from pagelet.runtime.block_table import UNMAPPED
from pagelet.runtime.cache_layout import CacheLayout, GroupLayout
from pagelet.runtime.prefix_cache import KeyChain, root_key
from pagelet.runtime.sequence_cache import SequenceCache

CONTEXT = 40
# What a slot holds stands for keys and values: they depend on the token, all before it, and the salt.
Content = tuple[str | None, tuple[int, ...]]


@dataclass
class Held:
    """A sequence as the model sees it."""

    salt: str | None
    cache: SequenceCache
    tokens: list[int] = field(default_factory=list)

    def content(self, position: int) -> Content:
        return self.salt, tuple(self.tokens[: position + 1])


class Model:
    """Carries out operations and keeps the memory that a backend would have."""

    def __init__(self, windows: tuple[int, ...], num_blocks: int, block_size: int) -> None:
        self.layout = CacheLayout(
            block_size, tuple(GroupLayout(window, num_blocks, 1) for window in windows), CONTEXT
        )
        self.blocks = BlockManager(self.layout, CONTEXT)
        self.memory: list[dict[tuple[int, int], Content]] = [{} for _ in windows]
        self.sequences: list[Held] = []
        self.hits = self.evictions = self.copies = 0

    def start(self, seed: int, number: int) -> None:
        """A prompt of few different tokens, so that many begin alike."""
        length = 1 + number % 30
        prompt = [int(i > 4 * (seed % 5)) * (1 + seed % 2) for i in range(length)]
        salt = [None, "a", "b"][seed % 7 % 3]
        held = Held(salt, self.blocks.new_cache(salt=salt, prefix_cache=seed % 11 > 0), prompt)
        prefix = held.cache.cached_prefix(held.tokens)
        assert prefix.length == self.longest_hit(held)
        demand = self.blocks.demand_after(prefix, length)
        before = [pool.num_available for pool in self.blocks.pools]
        fits = self.blocks.has_room(demand)
        held.cache.adopt(prefix)
        self.hits += prefix.length > 0
        if held.cache.append(length - prefix.length):
            after = [pool.num_available for pool in self.blocks.pools]
            # What was promised is enough; with a window, blocks come back before all are taken.
            assert all(a - b <= need for a, b, need in zip(before, after, demand, strict=True)) or not fits
            self.write(held, prefix.length)
            self.sequences.append(held)
            if seed % 3:
                held.cache.commit(held.tokens)
        else:
            assert not fits
            held.cache.free()

    def longest_hit(self, held: Held) -> int:
        """By trying every length."""
        size, keys = self.layout.block_size, held.cache.keys
        for count in range((len(held.tokens) - 1) // size, 0, -1):
            if keys is None:
                break
            names = keys.upto(held.tokens, count)
            for group, pool in zip(self.layout.groups, self.blocks.pools, strict=True):
                start = max(0, count * size - group.window + 1) if group.window else 0
                if any(pool.find(names[index]) is None for index in range(start // size, count)):
                    break
            else:
                return count * size
        return 0

    def append(self, held: Held, number: int) -> None:
        count = min(number % 9, CONTEXT - len(held.tokens))
        length = held.cache.length
        needs = held.cache.missing(count)
        fits = all(need <= pool.num_available for need, pool in zip(needs, self.blocks.pools, strict=True))
        assert held.cache.append(count) is fits
        if fits:
            held.tokens += [number % 3] * count
            self.write(held, length)

    def write(self, held: Held, begin: int) -> None:
        """What a step does: copies first, then the new tokens' slots."""
        for group, pairs in self.blocks.take_copies().items():
            for source, target in pairs:
                self.copies += 1
                for slot in range(self.layout.block_size):
                    if (source, slot) in self.memory[group]:
                        self.memory[group][target, slot] = self.memory[group][source, slot]
        for group, table in enumerate(held.cache.tables):
            for position in range(begin, held.cache.length):
                block, slot = self.slot(table.blocks, position)
                self.memory[group][block, slot] = held.content(position)

    def slot(self, blocks: Any, position: int) -> tuple[int, int]:
        logical, slot = divmod(position, self.layout.block_size)
        return int(blocks[logical]), slot

    def commit(self, held: Held, number: int) -> None:
        held.cache.commit(held.tokens)

    def truncate(self, held: Held, number: int) -> None:
        span = held.cache.length - held.cache.committed
        held.cache.truncate(held.cache.committed + number % (span + 1))
        del held.tokens[held.cache.length :]

    def fork(self, held: Held, number: int) -> None:
        length = number % (held.cache.length + 1)
        prefix = held.cache.shared_prefix(length)
        if length > held.cache.committed:
            assert prefix is None, "what a step still writes is not to be shared"
        if prefix is None:
            assert length > held.cache.committed or any(group.window for group in self.layout.groups)
            return
        child = Held(
            held.salt,
            self.blocks.new_cache(salt=held.salt, prefix_cache=held.cache.keys is not None),
            held.tokens[:length],
        )
        child.cache.adopt(prefix)
        self.sequences.append(child)

    def free(self, held: Held, number: int) -> None:
        held.cache.free()
        self.sequences.remove(held)

    def check(self) -> None:
        self.blocks.check_integrity(held.cache for held in self.sequences)
        for held in self.sequences:
            assert held.cache.length == len(held.tokens)
            for group, table in enumerate(held.cache.tables):
                window = self.layout.groups[group].window
                start = max(0, held.cache.committed - window + 1) if window else 0
                for position in range(start, held.cache.length):
                    block, slot = self.slot(table.blocks, position)
                    assert block != UNMAPPED
                    assert self.memory[group][block, slot] == held.content(position)
        live = {
            (group, self.slot(table.blocks, position))
            for held in self.sequences
            for group, table in enumerate(held.cache.tables)
            for position in range(held.cache.committed)
            if position > held.cache.committed - (table.window or CONTEXT + 1)
        }
        slots = self.blocks.live_slots(held.cache for held in self.sequences)
        # Exact but where a block is one sequence's edge and whole in another's table.
        assert slots <= len(live) + self.layout.block_size * len(self.sequences)
        if all(pool.num_shared == 0 for pool in self.blocks.pools):
            assert slots == len(live)
        for group, pool in zip(self.layout.groups, self.blocks.pools, strict=True):
            if not group.window:
                self.check_leaves_go_first(pool)

    def check_leaves_go_first(self, pool: Any) -> None:
        """With full attention, whatever is published has all that it continues published too."""
        contents = {self.memory[0][block, self.layout.block_size - 1] for block in pool._blocks.values()}
        for salt, tokens in contents:
            if len(tokens) > self.layout.block_size:
                assert (salt, tokens[: -self.layout.block_size]) in contents


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["start", "start", "append", "append", "commit", "commit", "fork", "truncate", "free"]
        ),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    min_size=15,
    max_size=60,
)


@settings(max_examples=250, deadline=None)
@example(
    # Tokens that were taken back must not leave their key to the ones that come instead.
    [("start", 93, 1), ("truncate", 0, 0), ("start", 19, 0), ("append", 0, 1), ("commit", 0, 0)],
    (0,),
    11,
    1,
)
@given(OPERATIONS, st.sampled_from([(0,), (6,), (0, 6), (0, 3, 11)]), st.integers(8, 24), st.integers(1, 5))
def test_every_sequence_reads_back_what_it_wrote(
    operations: list[tuple[str, int, int]], windows: tuple[int, ...], num_blocks: int, block_size: int
) -> None:
    model = Model(windows, num_blocks, block_size)
    for name, which, number in operations:
        if name == "start":
            model.start(which, number)
        elif model.sequences:
            getattr(model, name)(model.sequences[which % len(model.sequences)], number)
        model.check()
    for held in list(model.sequences):
        model.free(held, 0)
    model.check()
    assert model.blocks.num_used == 0


def test_a_long_run_meets_hits_evictions_and_copies() -> None:
    """The property test would prove little if these never happened."""
    rng = random.Random(4)
    model = Model((0, 6), 24, 4)
    names = ["start", "start", "append", "append", "commit", "commit", "fork", "truncate", "free", "free"]
    for _ in range(3000):
        name, which, number = rng.choice(names), rng.randrange(100), rng.randrange(100)
        if name == "start":
            model.start(which, number)
        elif model.sequences:
            getattr(model, name)(model.sequences[which % len(model.sequences)], number)
        model.check()
    assert model.hits > 50
    assert model.copies > 50
    assert model.blocks.num_evicted > 50


def test_a_window_gives_blocks_back_and_a_hit_needs_only_the_last_ones() -> None:
    model = Model((0, 6), 30, 4)
    blocks = model.blocks
    first = blocks.new_cache()
    tokens = list(range(34))
    assert first.append(33)
    first.commit(tokens)
    full, windowed = first.tables
    assert len(full.mapped()) == 9
    assert windowed.first == 6, "row 32, read once more, sees 27 to 32"
    assert windowed.blocks[:6].tolist() == [UNMAPPED] * 6
    assert blocks.pools[1].num_cached == 6
    first.free()
    # The windowed blocks that the row after the hit sees, and no others, can be lost.
    again = blocks.new_cache()
    assert again.cached_prefix(tokens).length == 32
    assert again.cached_prefix(tokens).firsts == (0, 6)
    for _ in range(30 - 8 + 6):  # free ones, then the six that went unused longest: logical blocks 0 to 5
        blocks.pools[1].allocate()
    assert again.cached_prefix(tokens).length == 32
    blocks.pools[1].allocate()
    assert again.cached_prefix(tokens).length == 0


def test_a_fork_copies_the_partly_filled_block_once_less_than_there_are_sequences() -> None:
    model = Model((0,), 30, 4)
    cache = model.blocks.new_cache()
    tokens = [7] * 7
    assert cache.append(6)
    cache.commit(tokens)
    children = [model.blocks.new_cache() for _ in range(3)]
    for child in children:
        prefix = cache.shared_prefix(6)
        assert prefix is not None
        assert model.blocks.demand_after(prefix, 7) == [1], "the copy"
        child.adopt(prefix)
    assert (model.blocks.num_used, model.blocks.num_shared) == (2, 2)
    for sequence in (cache, *children):
        assert sequence.append(1)
    copies = model.blocks.take_copies()[0]
    assert len(copies) == 3
    assert len({source for source, _ in copies}) == 1
    assert model.blocks.num_used == 1 + 4
    assert model.blocks.take_copies() == {}


def test_salts_and_models_have_keys_of_their_own() -> None:
    roots = {root_key(model, salt) for model in ("m", "n", "ma") for salt in (None, "a", "b", "aa", "\ud800")}
    assert len(roots) == 15
    chain = KeyChain(root_key("m", None), 4)
    keys = chain.upto(list(range(12)), 3)
    assert len(set(keys)) == 3
    assert KeyChain(root_key("m", None), 4).upto(list(range(8)), 2) == keys[:2]
    assert KeyChain(root_key("m", None), 4).upto([9, *range(1, 8)], 2)[1] != keys[1], "a key names all before"
    assert KeyChain(root_key("m", None), 2).upto(list(range(12)), 6)[1] != keys[0]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_without_a_prefix_cache_nothing_is_published(prefix_cache: bool) -> None:
    layout = CacheLayout(4, (GroupLayout(0, 10, 1),), 8)
    blocks = BlockManager(layout, CONTEXT, prefix_cache=prefix_cache)
    for private in (True, False):
        cache = blocks.new_cache(prefix_cache=not private)
        assert cache.cached_prefix([1] * 9).length == 0
        assert cache.append(9)
        cache.commit([1] * 9)
        cache.free()
        assert blocks.num_cached == (0 if private or not prefix_cache else 2)
