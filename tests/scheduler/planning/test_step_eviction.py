"""Mid-step eviction: a decision by cost, bounded by the work that bulk may lose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.control.budget import TokenBucket
from scheduler.control.step_limit import MAX_WASTED_SHARE
from scheduler.planning.step_eviction import (
    BUCKET_S,
    INTERACTIVE_WEIGHT,
    StepTiming,
    weigh_eviction,
)

LAYERS = 30
BULK_ONLY = StepTiming(started_s=1.0, step_s=0.06, kept_s=0.0)
MIXED = StepTiming(started_s=1.0, step_s=0.06, kept_s=0.015)


def test_eviction_pays_early_in_a_step_and_not_late() -> None:
    assert weigh_eviction(BULK_ONLY, 1.001, LAYERS).pays
    assert weigh_eviction(BULK_ONLY, 1.03, LAYERS).pays, (
        "half-way, as much is saved as wasted, and saved time counts for more"
    )
    assert not weigh_eviction(BULK_ONLY, 1.055, LAYERS).pays


def test_only_bulks_part_of_the_step_is_saved_and_wasted() -> None:
    half = weigh_eviction(MIXED, 1.03, LAYERS)
    assert half.wasted_s == pytest.approx(0.5 * 0.045)
    assert half.saved_s == pytest.approx(0.5 * 0.045 - 0.06 / 30)


def test_a_step_that_lasts_longer_than_predicted_is_about_to_end() -> None:
    assert not weigh_eviction(BULK_ONLY, 1.5, LAYERS).pays


@given(st.floats(0, 1), st.floats(0.001, 1), st.floats(0, 1))
def test_an_eviction_that_pays_never_wastes_more_than_it_is_worth(
    progress: float, step_s: float, kept_share: float
) -> None:
    tradeoff = weigh_eviction(StepTiming(0.0, step_s, kept_share * step_s), progress * step_s, LAYERS)
    assert not tradeoff.pays or tradeoff.wasted_s < INTERACTIVE_WEIGHT * tradeoff.saved_s
    assert tradeoff.saved_s + tradeoff.wasted_s <= step_s + 1e-9


@given(st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0, 0.2)), min_size=20, max_size=100))
def test_bulk_never_loses_more_than_its_share_and_the_initial_level(steps: list[tuple[float, float]]) -> None:
    bucket, ran_s, wasted_total_s = TokenBucket(BUCKET_S, MAX_WASTED_SHARE, BUCKET_S), 0.0, 0.0
    for bulk_s, wasted_s in steps:
        bucket.refill(bulk_s)
        ran_s += bulk_s
        if bucket.level >= wasted_s:
            bucket.spend(wasted_s)
            wasted_total_s += wasted_s
    assert wasted_total_s <= MAX_WASTED_SHARE * ran_s + BUCKET_S + 1e-9
