"""What the controller sees of the past."""

import pytest

from scheduler.windows import MAX_SAMPLES, MIN_SAMPLES, WINDOW_S, ArrivalRate, LatencyWindow


def filled(count: int, seconds: float = 1.0, now: float = 0.0) -> LatencyWindow:
    window = LatencyWindow()
    for _ in range(count):
        window.add(now, seconds)
    return window


def test_with_too_few_samples_a_p99_says_nothing() -> None:
    assert filled(MIN_SAMPLES - 1).p99(0.0) is None
    assert filled(MIN_SAMPLES).p99(0.0) == 1.0


def test_p99_is_the_quantile() -> None:
    window = LatencyWindow()
    for i in range(1, 101):
        window.add(0.0, i / 100)
    assert window.p99(0.0) == pytest.approx(0.99, abs=0.002)


def test_the_past_leaves_the_window() -> None:
    window = filled(MIN_SAMPLES)
    assert window.p99(WINDOW_S) == 1.0
    assert window.p99(WINDOW_S + 0.001) is None


def test_only_what_came_since_an_event_counts() -> None:
    window = filled(MIN_SAMPLES, seconds=1.0, now=1.0)
    assert window.p99(2.0, since_s=1.5) is None
    assert window.miss_share(2.0, target_s=0.5, since_s=1.5) is None
    for _ in range(MIN_SAMPLES):
        window.add(2.0, 0.1)
    assert window.p99(2.0, since_s=1.5) == pytest.approx(0.1)
    assert window.miss_share(2.0, target_s=0.5, since_s=1.5) == 0.0
    assert window.miss_share(2.0, target_s=0.5, since_s=0.0) == 0.5


def test_on_target_is_no_miss() -> None:
    assert filled(MIN_SAMPLES, seconds=0.5).miss_share(0.0, target_s=0.5, since_s=0.0) == 0.0


def test_the_newest_samples_are_kept() -> None:
    window = filled(MAX_SAMPLES, seconds=9.0)
    for _ in range(MAX_SAMPLES):
        window.add(1.0, 0.1)
    assert window.p99(1.0) == pytest.approx(0.1)


def test_the_arrival_rate_settles_and_decays() -> None:
    rate = ArrivalRate(tau_s=5.0)
    rate.update(0.0)
    for i in range(1, 101):
        rate.add(10)
        per_s = rate.update(i * 0.5)
    assert per_s == pytest.approx(20, rel=0.01)
    assert rate.update(50.0 + 5.0) == pytest.approx(20 / 2.718, rel=0.02)
    assert rate.update(500.0) == pytest.approx(0, abs=1e-6)


def test_the_rate_starts_with_the_first_interval() -> None:
    rate = ArrivalRate()
    rate.add(1000)
    assert rate.update(7.0) == 0.0, "since when did they arrive?"
    assert rate.update(7.0) == 0.0
