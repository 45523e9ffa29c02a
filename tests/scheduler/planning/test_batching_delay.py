"""Wait-or-full: when another arrival is worth waiting for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.clock import NEVER_S
from scheduler.control.budget import Budgets, TierBudget
from scheduler.control.max_wait import fill_ms, is_worth_it, longest_wait_ms
from scheduler.planning.batching_delay import idle_until_s, is_waiting
from tests.scheduler.builders import FAST, make_state, make_table, make_tiers

positive = st.floats(1e-4, 1e4)


def test_light_traffic_starts_at_once_and_a_flood_waits() -> None:
    """A step costs 100 ms: at 10 requests a second none waits, at 100 a second all do."""
    assert not is_worth_it(arrival_gap_s=0.1, fixed_s=0.1)
    assert is_worth_it(arrival_gap_s=0.01, fixed_s=0.1)


@given(positive, positive, st.floats(0, 50), st.floats(50, 500))
def test_the_longest_wait_is_inside_its_bounds_and_leaves_time_for_the_slo(
    ttft_ms: float, step_s: float, min_ms: float, max_ms: float
) -> None:
    wait_ms = longest_wait_ms(ttft_ms, step_s, min_ms, max_ms)
    assert min_ms <= wait_ms <= max_ms
    assert wait_ms == min_ms or wait_ms < ttft_ms
    assert longest_wait_ms(None, step_s, min_ms, max_ms) == max_ms


def test_no_request_waits_for_a_batch_that_fills_too_slowly() -> None:
    assert fill_ms(64, 100, 0, 1000) == 640
    assert fill_ms(64, 10, 0, 1000) == 0
    assert fill_ms(64, 0, 0, 1000) is None


@pytest.mark.parametrize("name", ["realtime", "bulk"])
def test_nobody_waits_to_join_a_step_that_others_need(name: str) -> None:
    tiers = make_tiers()
    table = make_table(tiers, [make_state("new", name, claimed_s=0.0)])
    budget = TierBudget(8, max_wait_s=1.0, arrival_gap_s=0.001)
    assert is_waiting(tiers[name], table, budget, 8, 0.1, False, 0.5)
    assert not is_waiting(tiers[name], table, budget, 8, 0.1, True, 0.5)


def test_an_idle_loop_sleeps_until_the_next_max_wait_ends() -> None:
    """A request past max-wait is blocked on something else, whose event wakes the loop. Waking up for it again
    and again would be a busy loop."""
    tiers = make_tiers()
    states = [make_state("rt", claimed_s=1.0), make_state("b", "bulk", claimed_s=1.0), make_state("c", "bulk")]
    waits = {"realtime": 0.5, "bulk": 3.0, "batch": 9.0}
    budgets = Budgets({name: TierBudget(4, max_wait_s=wait_s) for name, wait_s in waits.items()}, FAST, FAST)
    table = make_table(tiers, states)
    ends_s = [idle_until_s(tiers.by_priority, table, budgets, now) for now in (1.2, 1.5, 2.9, 3.0)]
    assert ends_s == [1.5, 3.0, 3.0, NEVER_S], "the oldest of a tier is the one that counts"


def test_a_wait_that_ends_a_rounding_error_from_now_is_over() -> None:
    """Else a timer would fire at once, again and again, and virtual time would stand still."""
    tiers, now = make_tiers(), 9.7275
    tier = tiers["bulk"]
    table = make_table(tiers, [make_state("b", "bulk", claimed_s=now - 0.05)])
    for rest_s, is_over in ((math.ulp(now), True), (0.001, False)):
        budget = TierBudget(8, max_wait_s=0.05 + rest_s, arrival_gap_s=0.001)
        assert is_waiting(tier, table, budget, 8, 0.1, False, now) is not is_over
        ends_s = idle_until_s([tier], table, Budgets({"bulk": budget}, FAST, FAST), now)
        assert (ends_s == NEVER_S) is is_over
