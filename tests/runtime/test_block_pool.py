import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagelet.runtime.block_pool import UNMAPPED, BlockPool, BlockTable

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 3), st.integers(0, 20)),
        st.tuples(st.just("truncate"), st.integers(0, 3), st.integers(0, 40)),
        st.tuples(st.just("free"), st.integers(0, 3), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(OPERATIONS, st.integers(1, 12), st.integers(1, 5))
def test_tables_against_a_model_that_counts_tokens(
    operations: list[tuple[str, int, int]], num_blocks: int, block_size: int
) -> None:
    pool = BlockPool(num_blocks, block_size)
    tables = [BlockTable(pool, max_blocks=num_blocks) for _ in range(4)]
    lengths = [0] * 4

    def blocks_used() -> int:
        return sum((length + block_size - 1) // block_size for length in lengths)

    for name, which, number in operations:
        before = lengths[which]
        if name == "append":
            lengths[which] += number
            fits = blocks_used() <= num_blocks
            if not fits:
                lengths[which] = before
            assert tables[which].append(number) is fits
        elif name == "truncate":
            lengths[which] = min(number, before)
            tables[which].truncate(lengths[which])
        else:
            lengths[which] = 0
            tables[which].free()
        assert [table.length for table in tables] == lengths
        assert pool.num_used == blocks_used()
        assert pool.num_free == num_blocks - blocks_used()
        pool.check_integrity(tables)


def test_a_truncated_table_keeps_its_first_blocks() -> None:
    pool = BlockPool(8, 4)
    table = BlockTable(pool, 8)
    assert table.append(30)
    first = table.mapped()[:2]
    table.truncate(5)
    assert table.mapped() == first
    assert table.blocks[2:].tolist() == [UNMAPPED] * 6


def test_a_shared_block_is_freed_with_its_last_reference() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.num_used == 1
    pool.release(block)
    assert pool.num_used == 0
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(block)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(block)


def test_check_integrity_finds_each_fault() -> None:
    pool = BlockPool(4, 4)
    table = BlockTable(pool, 4)
    table.append(8)
    pool.check_integrity([table])
    with pytest.raises(AssertionError, match="neither free nor in a table"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity([table, table])
    table.length = 3
    with pytest.raises(AssertionError, match="too many or too few"):
        pool.check_integrity([table])
    table.length = 8
    pool.release(table.mapped()[0])
    with pytest.raises(AssertionError, match="both free and in a table"):
        pool.check_integrity([table])
