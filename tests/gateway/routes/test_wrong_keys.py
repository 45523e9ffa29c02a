"""Wrong keys of one address are refused at a bounded rate."""

from gateway.routes.dependencies import FREE, MAX_ADDRESSES, MAX_DELAY_S, PERIOD_S, WrongKeys


def test_after_the_free_ones_refusals_come_one_by_one() -> None:
    keys = WrongKeys()
    assert [keys.delay_s("a", 100.0) for _ in range(FREE)] == [0.0] * FREE
    assert [keys.delay_s("a", 100.0) for _ in range(3)] == [PERIOD_S, 2 * PERIOD_S, 3 * PERIOD_S]
    assert keys.delay_s("b", 100.0) == 0.0
    assert max(keys.delay_s("a", 100.0) for _ in range(100)) == MAX_DELAY_S


def test_the_memory_is_bounded_and_busy_addresses_are_kept() -> None:
    keys = WrongKeys()
    for i in range(2 * MAX_ADDRESSES):
        keys.delay_s(str(i), 100.0)
        delay_s = keys.delay_s("busy", 100.0)
    assert delay_s == MAX_DELAY_S
    assert len(keys._paid_until_s) == MAX_ADDRESSES
