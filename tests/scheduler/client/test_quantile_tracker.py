"""QuantileTracker: where it settles, how fast it moves, and its bounds."""

import random

import pytest

from scheduler.client.forecast_correction import QuantileTracker


def exceeding_share(tracker: QuantileTracker, share: float, count: int = 20_000) -> float:
    """Feed normal samples; return the share of the later half that exceeded the value."""
    rng, exceeded = random.Random(2), []
    for _ in range(count):
        exceeded.append(rng.gauss(10.0, 1.0) > tracker.value)
        if exceeded[-1]:
            tracker.up()
        else:
            tracker.down(share / (1 - share))
    return sum(exceeded[count // 2 :]) / (count // 2)


@pytest.mark.parametrize("share", [0.05, 0.5])
@pytest.mark.parametrize("start", [1.0, 50.0])
def test_the_given_share_of_samples_exceeds_it_wherever_it_starts(start: float, share: float) -> None:
    tracker = QuantileTracker(start, 0.02, 0.1, 100.0)
    assert exceeding_share(tracker, share) == pytest.approx(share, rel=0.2)


def test_up_is_faster_than_down_where_few_may_exceed() -> None:
    tracker = QuantileTracker(1.0, 0.1, 0.0, 2.0)
    tracker.up()
    tracker.down(odds=0.01)
    assert tracker.value == pytest.approx(1.1 * 0.999)


def test_it_moves_by_shares_of_its_value() -> None:
    small, large = (QuantileTracker(value, 0.1, 0.0, 1000.0) for value in (1.0, 100.0))
    for tracker in (small, large):
        tracker.up()
        tracker.down(odds=0.5)
    assert large.value == pytest.approx(100 * small.value) != 100.0


def test_it_stays_inside_its_bounds_and_leaves_them_at_once() -> None:
    tracker = QuantileTracker(1.0, 0.5, 0.5, 2.0)
    for _ in range(100):
        tracker.up()
    assert tracker.value == 2.0
    tracker.down(odds=0.1)
    assert tracker.value < 2.0
    for _ in range(1000):
        tracker.down(odds=0.1)
    assert tracker.value == 0.5
