from hypothesis import given
from hypothesis import strategies as st

from pagelet.models.errors import CapacityError
from pagelet.runtime.cache_layout import CacheShape, blocks_at_most


@given(st.integers(1, 60), st.integers(1, 80), st.integers(1, 9), st.integers(1, 20))
def test_blocks_at_most_is_the_most_that_any_step_needs(
    window: int, num_tokens: int, block_size: int, step: int
) -> None:
    needed = 0
    for past in range(num_tokens):
        end = min(past + step, num_tokens)
        first = max(0, past - window)
        needed = max(needed, (end - 1) // block_size - first // block_size + 1)
    bound = blocks_at_most(window, num_tokens, block_size, step)
    assert needed <= bound <= needed + 1  # one more where these numbers never meet the worst alignment
    assert blocks_at_most(0, num_tokens, block_size, step) == -(-num_tokens // block_size)


@given(
    st.lists(st.tuples(st.sampled_from([0, 5, 40, 300]), st.integers(1, 50)), min_size=1, max_size=3),
    st.integers(1, 40_000),
    st.integers(1, 400),
    st.integers(1, 64),
)
def test_memory_is_divided_within_its_bound_and_one_sequence_fits(
    groups: list[tuple[int, int]], num_bytes: int, context: int, step: int
) -> None:
    shape = CacheShape(8, tuple(groups), step)
    one_block_each = sum(size for _, size in groups)
    try:
        layout = shape.layout(num_bytes, context)
    except CapacityError:
        assert num_bytes < one_block_each
        return
    assert layout.num_bytes <= num_bytes
    longest = layout.max_tokens(context)
    assert 1 <= longest <= context
    for group in layout.groups:
        assert group.num_blocks >= blocks_at_most(group.window, longest, 8, step)
    if longest < context:
        assert shape.sequence_bytes(longest + 8) > num_bytes, "a longer sequence would have fitted"
    else:
        # Less is left over than one more decoding sequence takes, but for rounding in each group.
        each = sum(blocks_at_most(window, context, 8, 1) * size for window, size in groups)
        assert num_bytes - layout.num_bytes < each + one_block_each


def test_one_group_takes_all_and_a_window_takes_little() -> None:
    assert CacheShape(32, ((0, 100),), 512).layout(12_345, 8192).groups[0].num_blocks == 123
    shape = CacheShape(32, ((0, 100), (1024, 100)), 512)
    assert shape.sequence_blocks(131_072) == [4096, 49]
    layout = shape.layout(4_000_000, 131_072)
    # The rest after one sequence, divided as 4096 to the 33 blocks that a window needs to decode.
    assert [group.num_blocks for group in layout.groups] == [4096 + 35_568, 49 + 286]
