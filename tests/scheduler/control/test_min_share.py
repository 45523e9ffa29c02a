"""The floor as a debt: laws of its books."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.control.min_share import MAX_DEFICIT_S, URGENT_SHARE, DeficitCounter
from tests.scheduler.builders import make_tiers

STEP_S = 0.03


def books(floor: float = 0.05) -> DeficitCounter:
    return DeficitCounter(make_tiers(bulk={"floor": floor}).by_priority)


@given(st.lists(st.floats(0.001, 0.2), min_size=100, max_size=400), st.floats(0.01, 0.4))
def test_a_tier_that_is_served_whenever_it_is_owed_gets_its_share(steps: list[float], floor: float) -> None:
    kept, used_s = books(floor), 0.0
    for elapsed_s in steps:
        mine_s = elapsed_s if kept.has_deficit("bulk", STEP_S) else 0.0
        kept.add_step(elapsed_s, {"bulk": mine_s}, ["bulk"])
        used_s += mine_s
        assert 0 <= kept.deficit_s("bulk") <= MAX_DEFICIT_S
    assert used_s >= floor * sum(steps) - STEP_S - floor * max(steps)


def test_urgent_work_is_owed_more_and_never_more_than_may_be_given() -> None:
    kept = books(0.02)
    shares = []
    for urgency in (0.0, 0.5, 1.0, 7.0):
        kept.set_urgency("bulk", urgency)
        shares.append(kept.share("bulk"))
    assert shares[0] == 0.02 and shares == sorted(shares) and shares[-1] == URGENT_SHARE


def test_urgency_gives_a_share_where_there_is_no_floor() -> None:
    kept = books(0.0)
    kept.add_step(10.0, {}, ["bulk"])
    assert not kept.has_deficit("bulk", STEP_S)
    kept.set_urgency("bulk", 1.0)
    kept.add_step(0.1, {}, ["bulk"])
    assert kept.has_deficit("bulk", STEP_S)


def test_who_wants_nothing_is_owed_nothing() -> None:
    kept = books(0.1)
    kept.add_step(10.0, {}, ["realtime"])
    assert kept.deficit_s("bulk") == 0


def test_debts_survive_new_tiers() -> None:
    before, after = books(0.1), books(0.2)
    before.add_step(1.0, {}, ["bulk"])
    after.take_over(before)
    assert after.deficit_s("bulk") == pytest.approx(0.1)
