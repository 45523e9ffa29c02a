"""The blocks that bulk leaves free."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.control.kv_reserve import MAX_SHARE, MIN_SHARE, KVReserve


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_the_reserve_stays_between_its_bounds(held: list[int]) -> None:
    reserve = KVReserve()
    for blocks in held:
        reserve.observe(blocks, 1000)
        assert MIN_SHARE * 1000 <= reserve.num_blocks <= MAX_SHARE * 1000


def test_it_follows_what_interactive_sequences_take_between_two_looks() -> None:
    reserve = KVReserve()
    for look in range(200):
        reserve.observe(120 * (look % 2), 1000)
    assert 60 <= reserve.num_blocks <= 300, "growth of 120 at every other look"
    for _ in range(200):
        reserve.observe(120, 1000)
    assert reserve.num_blocks == MIN_SHARE * 1000, "what stays does not grow"


def test_without_a_look_nothing_is_reserved() -> None:
    assert KVReserve().num_blocks == 0
