"""The blocks that bulk leaves free."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.control.kv_reserve import KVReserve


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_the_reserve_is_never_nothing_and_never_half_of_the_blocks(held: list[int]) -> None:
    reserve = KVReserve()
    assert reserve.num_blocks == 0, "without a look"
    for blocks in held:
        reserve.observe(blocks, 1000)
        assert 0 < reserve.num_blocks < 500


def test_it_follows_what_interactive_sequences_take_between_two_looks() -> None:
    reserve = KVReserve()
    reserve.observe(0, 1000)
    smallest = reserve.num_blocks
    for look in range(200):
        reserve.observe(120 * (look % 2), 1000)
    assert smallest < 60 <= reserve.num_blocks, "120 more at every other look"
    for _ in range(200):
        reserve.observe(120, 1000)
    assert reserve.num_blocks == smallest, "what stays does not grow"
