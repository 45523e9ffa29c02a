import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sequences.block_pool import BlockPool


@given(num_blocks=st.integers(0, 40), wishes=st.lists(st.integers(-40, 40), max_size=60))
def test_blocks_are_conserved_and_never_given_to_two(num_blocks: int, wishes: list[int]) -> None:
    """A positive wish allocates, a negative one frees that many of what is held."""
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for wish in wishes:
        if wish < 0:
            returned, held = held[:-wish], held[-wish:]
            pool.free(returned, "a")
        elif wish <= pool.num_free:
            held += pool.allocate(wish, "a")
        else:
            with pytest.raises(MemoryError):
                pool.allocate(wish, "a")
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert pool.num_used == len(held) == len(set(held))
        assert set(held) <= set(range(num_blocks))


def test_the_block_freed_last_is_handed_out_first() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3, "a")
    pool.free(reversed(first), "a")
    assert pool.allocate(3, "b") == first


def test_a_block_is_not_freed_twice_nor_by_a_stranger() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1, "a")
    with pytest.raises(ValueError, match="not held by b"):
        pool.free([block], "b")
    pool.free([block], "a")
    with pytest.raises(ValueError, match="not held by a"):
        pool.free([block], "a")
    assert pool.num_free == 4


def test_a_pool_may_be_empty_but_not_less() -> None:
    assert BlockPool(0).num_free == 0
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockPool(-1)


def cached_block(pool: BlockPool, holder: str, digest: bytes = b"d", retention: int = 0) -> int:
    (block,) = pool.allocate(1, holder)
    pool.cache.add(block, digest, retention)
    return block


def test_a_shared_block_counts_once_and_is_free_when_the_last_holder_has_left() -> None:
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
    assert pool.cache.find(b"d") == block, "free, and still to be found"


def test_holders_learn_how_many_of_their_blocks_others_hold_too() -> None:
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


def test_what_becomes_free_depends_on_who_leaves_together() -> None:
    pool = BlockPool(4)
    shared, own = cached_block(pool, "a"), pool.allocate(1, "a")
    pool.share(shared, "b")
    assert pool.num_freed_by([[shared, *own]]) == 1
    assert pool.num_freed_by([[shared]]) == 0
    assert pool.num_freed_by([[shared, *own], [shared]]) == 2


def test_cached_blocks_are_handed_out_last() -> None:
    pool = BlockPool(3)
    block = cached_block(pool, "a")
    pool.free([block], "a")
    assert block not in pool.allocate(2, "b")
    assert pool.allocate(1, "c") == [block]
    assert pool.cache.find(b"d") is None, "and then forgotten"
