"""The block pool: conservation, sharing, and the order in which blocks are allocated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sequences.block_pool import BlockPool


@given(num_blocks=st.integers(0, 40), changes=st.lists(st.integers(-40, 40), max_size=60))
def test_blocks_are_conserved_and_never_allocated_twice(num_blocks: int, changes: list[int]) -> None:
    """A positive change allocates that many blocks, a negative one frees that many."""
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for change in changes:
        if change < 0:
            returned, held = held[:-change], held[-change:]
            pool.free(returned, "a")
        elif change <= pool.num_free:
            held += pool.allocate(change, "a")
        else:
            with pytest.raises(MemoryError):
                pool.allocate(change, "a")
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert pool.num_used == len(held) == len(set(held))
        assert set(held) <= set(range(num_blocks))


def test_the_block_freed_last_is_allocated_first() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3, "a")
    pool.free(reversed(first), "a")
    assert pool.allocate(3, "b") == first


def test_a_block_is_freed_once_and_by_its_holder_only() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1, "a")
    with pytest.raises(ValueError, match="not held by b"):
        pool.free([block], "b")
    pool.free([block], "a")
    with pytest.raises(ValueError, match="not held by a"):
        pool.free([block], "a")
    assert pool.num_free == 4


def cached_block(pool: BlockPool, holder: str, digest: bytes = b"d", retention: int = 0) -> int:
    (block,) = pool.allocate(1, holder)
    pool.cache.add(block, digest, retention)
    return block


def test_a_shared_block_counts_once_and_is_free_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(4)
    block = cached_block(pool, "a")
    pool.share(block, "b")
    pool.share(block, "c")
    assert (pool.num_free, pool.num_used) == (3, 1)
    for holder in ("a", "c"):
        pool.free([block], holder)
        assert (pool.num_free, pool.num_used) == (3, 1)
        with pytest.raises(ValueError, match="not held"):
            pool.free([block], holder)
    pool.free([block], "b")
    assert (pool.num_free, pool.num_used) == (4, 0)
    assert pool.cache.find(b"d") == block, "free, and still cached"


def test_changes_in_the_number_of_shared_blocks_are_reported() -> None:
    pool = BlockPool(4)
    first, second = cached_block(pool, "a", b"1"), cached_block(pool, "a", b"2")
    assert pool.take_changes() == ()
    pool.share(first, "b")
    pool.share(second, "b")
    pool.share(first, "c")
    assert pool.take_changes() == (("a", 2), ("b", 2), ("c", 1))
    pool.free([first, second], "a")
    assert pool.take_changes() == (("a", 0), ("b", 1))
    pool.free([first], "c")
    assert pool.take_changes() == (("b", 0), ("c", 0))


def test_a_shared_block_becomes_free_when_all_its_holders_release_it_together() -> None:
    pool = BlockPool(4)
    shared, own = cached_block(pool, "a"), pool.allocate(1, "a")
    pool.share(shared, "b")
    assert pool.num_freed_by([[shared, *own]]) == 1
    assert pool.num_freed_by([[shared]]) == 0
    assert pool.num_freed_by([[shared, *own], [shared]]) == 2


def test_cached_blocks_are_allocated_last() -> None:
    pool = BlockPool(3)
    block = cached_block(pool, "a")
    pool.free([block], "a")
    assert block not in pool.allocate(2, "b")
    assert pool.allocate(1, "c") == [block]
    assert pool.cache.find(b"d") is None, "and then not cached any more"
