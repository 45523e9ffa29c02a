"""Leaving a running step: a decision by cost, bounded by what bulk may lose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.planning.step_eviction import CREDIT_START_S, WASTE_SHARE, WORTH, StepInFlight, TokenBucket, exchange

BULK_ONLY = StepInFlight(started_s=1.0, step_s=0.06, kept_s=0.0)
MIXED = StepInFlight(started_s=1.0, step_s=0.06, kept_s=0.015)


def test_early_in_a_step_leaving_pays_and_late_it_does_not() -> None:
    assert exchange(BULK_ONLY, 1.001).pays
    assert exchange(BULK_ONLY, 1.03).pays, "half-way: as much saved as thrown away, and the saved counts for more"
    assert not exchange(BULK_ONLY, 1.055).pays


def test_only_bulks_part_of_the_step_is_saved_and_thrown_away() -> None:
    half = exchange(MIXED, 1.03)
    assert half.thrown_s == pytest.approx(0.5 * 0.045)
    assert half.saved_s == pytest.approx(0.5 * 0.045 - 0.06 / 30)


def test_a_step_that_lasts_longer_than_predicted_is_about_to_end() -> None:
    assert not exchange(BULK_ONLY, 1.5).pays


def test_a_moment_saved_is_not_worth_the_trouble() -> None:
    assert not exchange(StepInFlight(1.0, 0.002, 0.0), 1.0).pays


@given(st.floats(0, 1), st.floats(0.001, 1), st.floats(0, 1))
def test_what_pays_never_throws_away_more_than_its_worth(progress: float, step_s: float, kept_share: float) -> None:
    deal = exchange(StepInFlight(0.0, step_s, kept_share * step_s), progress * step_s)
    assert not deal.pays or deal.thrown_s < WORTH * deal.saved_s
    assert deal.saved_s + deal.thrown_s <= step_s + 1e-9


@given(st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0, 0.2)), min_size=50, max_size=300))
def test_bulk_never_loses_more_than_its_share_and_the_credit(steps: list[tuple[float, float]]) -> None:
    credit, earned_s, spent_s = TokenBucket(), 0.0, 0.0
    for bulk_s, thrown_s in steps:
        credit.earn(bulk_s)
        earned_s += bulk_s
        if credit.can_spend(thrown_s):
            credit.spend(thrown_s)
            spent_s += thrown_s
    assert spent_s <= WASTE_SHARE * earned_s + CREDIT_START_S + 1e-9
