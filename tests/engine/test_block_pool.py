import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool


@given(num_blocks=st.integers(1, 40), wishes=st.lists(st.integers(-40, 40), max_size=60))
def test_blocks_are_conserved_and_never_shared(num_blocks: int, wishes: list[int]) -> None:
    """A positive wish allocates, a negative one frees that many of what is held."""
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for wish in wishes:
        if wish < 0:
            returned, held = held[:-wish], held[-wish:]
            pool.free(returned)
        elif pool.can_allocate(wish):
            held += pool.allocate(wish)
        else:
            with pytest.raises(MemoryError):
                pool.allocate(wish)
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert pool.num_used == len(held) == len(set(held))
        assert set(held) <= set(range(num_blocks))


def test_the_block_freed_last_is_handed_out_first() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3)
    pool.free(reversed(first))
    assert pool.allocate(3) == first


def test_a_block_is_not_freed_twice() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(ValueError, match="free already"):
        pool.free([block])
    assert pool.num_free == 4


def test_a_pool_has_a_block() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)
