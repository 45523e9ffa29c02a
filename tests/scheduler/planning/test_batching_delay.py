"""Wait-or-full: when another arrival is worth waiting for."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.clock import NEVER_S
from scheduler.control.budget import Budgets, TierBudget
from scheduler.control.max_wait import fill_ms, is_worth_it, longest_wait_ms
from scheduler.planning.batching_delay import idle_until_s
from tests.scheduler.builders import FAST, make_state, make_table, make_tiers

positive = st.floats(1e-4, 1e4)


def test_low_traffic_flushes_at_once_and_a_flood_waits_for_company() -> None:
    """A call of 100 ms: at 10 a second nobody waits, at 100 a second all do."""
    assert not is_worth_it(gap_s=0.1, fixed_s=0.1)
    assert is_worth_it(gap_s=0.01, fixed_s=0.1)


@given(positive, positive)
def test_the_denser_the_traffic_the_more_it_is_worth(gap_s: float, fixed_s: float) -> None:
    assert is_worth_it(gap_s / 2, fixed_s) or not is_worth_it(gap_s, fixed_s)


@given(positive, positive, st.floats(0, 50), st.floats(50, 500))
def test_the_longest_wait_is_inside_its_bounds_and_leaves_the_promise_its_share(
    ttft_ms: float, step_s: float, min_ms: float, max_ms: float
) -> None:
    wait_ms = longest_wait_ms(ttft_ms, step_s, min_ms, max_ms)
    assert min_ms <= wait_ms <= max_ms
    assert wait_ms == min_ms or wait_ms <= 0.5 * ttft_ms
    assert longest_wait_ms(None, step_s, min_ms, max_ms) == max_ms


def test_a_batch_that_fills_too_slowly_is_not_waited_for() -> None:
    assert fill_ms(64, 100, 0, 1000) == 640
    assert fill_ms(64, 10, 0, 1000) == 0
    assert fill_ms(64, 0, 0, 1000) is None


def test_an_idle_loop_sleeps_until_the_first_patience_to_end_and_not_for_one_that_has_ended() -> None:
    """Who has waited long enough for company and is still here waits for something else: room, which says itself when
    it is there. To wake up for it again and again would be a busy loop."""
    tiers = make_tiers()
    states = [make_state("rt", claimed_s=1.0), make_state("b", "bulk", claimed_s=1.0), make_state("c", "bulk")]
    waits = {"realtime": 0.5, "bulk": 3.0, "batch": 9.0}
    budgets = Budgets({name: TierBudget(4, max_wait_s=wait_s) for name, wait_s in waits.items()}, FAST)
    table = make_table(tiers, states)
    ends_s = [idle_until_s(tiers.by_priority, table, budgets, now) for now in (1.2, 1.5, 2.9, 3.0)]
    assert ends_s == [1.5, 3.0, 3.0, NEVER_S], "the oldest of a tier is the one that counts"
