import pytest

from pagelet.runtime.block_pool import BlockPool


def test_a_shared_block_is_freed_with_its_last_reference() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    assert (pool.num_used, pool.num_shared) == (1, 1)
    pool.release(block)
    assert (pool.num_used, pool.num_shared) == (1, 0)
    pool.release(block)
    assert (pool.num_used, pool.num_free, pool.num_cached) == (0, 2, 0)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(block)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(block)


def test_a_published_block_stays_until_its_memory_is_needed() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    assert pool.publish(block, b"a") == block
    assert not pool.is_writable(block)
    pool.release(block)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 1, 2)
    pool.share(block)
    assert (pool.num_used, pool.find(b"a")) == (1, block)
    pool.release(block)
    assert pool.allocate() != block, "a free block goes before a cached one"
    assert pool.find(b"a") == block
    assert pool.allocate() == block
    assert (pool.find(b"a"), pool.num_evicted) == (None, 1)


def test_the_block_that_went_unused_longest_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = {key: pool.publish(pool.allocate(), key) for key in (b"a", b"b", b"c", b"d")}
    for key in (b"c", b"a", b"d", b"b"):
        pool.release(blocks[key])
    pool.share(blocks[b"c"])  # used once more
    pool.release(blocks[b"c"])
    assert [pool.allocate() for _ in range(4)] == [blocks[key] for key in (b"a", b"d", b"b", b"c")]


def test_two_blocks_with_one_key_become_one() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"a")
    assert pool.publish(second, b"a") == first
    assert (pool.num_used, pool.num_shared, pool.num_free) == (1, 1, 3)
    assert pool.publish(first, b"a") == first, "publishing twice changes nothing"
    pool.check_integrity([first, first])
    with pytest.raises(AssertionError, match="two keys"):
        pool.publish(first, b"b")
    with pytest.raises(AssertionError, match="not in use"):
        pool.publish(second, b"b")


def test_check_integrity_finds_each_fault() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"a")
    pool.check_integrity([first, second])
    for held, message in [
        ([first], "neither free nor cached nor in a table"),
        ([first, second, second], "counts 1 references, tables hold 2"),
        ([first, second, 3], "both free and in a table"),
    ]:
        with pytest.raises(AssertionError, match=message):
            pool.check_integrity(held)
    pool.release(first)
    with pytest.raises(AssertionError, match="both cached and in a table"):
        pool.check_integrity([first, second])
    pool.check_integrity([second])
    pool._blocks.clear()
    with pytest.raises(AssertionError, match="index"):
        pool.check_integrity([second])
