"""Sliding windows and the arrival rate."""

import pytest

from scheduler.control.windows import (
    BUCKET_WIDTH,
    MIN_SAMPLES,
    WINDOW_S,
    ArrivalRate,
    SlidingWindow,
)


def filled(count: int, seconds: float = 1.0, now: float = 0.0) -> SlidingWindow:
    window = SlidingWindow()
    for _ in range(count):
        window.add(now, seconds > 0.5, seconds)
    return window


def test_with_too_few_samples_there_is_no_p99() -> None:
    assert filled(MIN_SAMPLES - 1).p99(0.0) is None
    assert filled(MIN_SAMPLES).p99(0.0) == 1.0


def test_p99_is_the_quantile() -> None:
    window = SlidingWindow()
    for i in range(1, 101):
        window.add(0.0, False, i / 100)
    assert window.p99(0.0) == pytest.approx(0.99, rel=BUCKET_WIDTH)


def test_only_samples_since_the_given_time_count() -> None:
    window = filled(MIN_SAMPLES, seconds=1.0, now=1.0)
    assert window.p99(2.0, since_s=1.5) is None
    assert window.miss_share(2.0, since_s=1.5) is None
    for _ in range(MIN_SAMPLES):
        window.add(2.0, False, 0.1)
    assert window.p99(2.0, since_s=1.5) == pytest.approx(0.1, rel=BUCKET_WIDTH)
    assert window.miss_share(2.0, since_s=1.5) == 0.0
    assert window.miss_share(2.0, since_s=0.0) == 0.5


def test_the_window_is_as_long_at_any_rate_of_samples() -> None:
    """A burst of slow tokens half a minute ago still counts after as many fast ones as an engine makes since."""
    window = SlidingWindow()
    for _ in range(1000):
        window.add(0.0, True, 9.0)
    for n in range(30_000):
        window.add(0.001 * n, False, 0.1)
    assert window.p99(29.9) == pytest.approx(9.0, rel=BUCKET_WIDTH)
    assert window.miss_share(29.9, since_s=0.0) == 1000 / 31_000
    assert window.p99(31.0) == pytest.approx(0.1, rel=BUCKET_WIDTH)


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 0.0123, 1.0, 77.7, 3600.0])
def test_a_latency_of_any_size_is_shown_to_half_a_percent(seconds: float) -> None:
    assert filled(MIN_SAMPLES, seconds).p99(0.0) == pytest.approx(seconds, rel=BUCKET_WIDTH / 2 + 1e-4, abs=1e-6)


def test_a_share_is_that_of_the_window_and_none_without_data() -> None:
    window = SlidingWindow()
    assert window.miss_share(0.0, min_samples=1) is None
    window.add(0.0, True)
    window.add(20.0, False)
    assert window.miss_share(20.0, min_samples=1) == 0.5
    assert window.miss_share(20.0, min_samples=3) is None
    assert window.miss_share(WINDOW_S + 0.1, min_samples=1) == 0.0
    assert window.miss_share(20.1 + WINDOW_S, min_samples=1) is None


def test_the_arrival_rate_settles_and_decays() -> None:
    rate = ArrivalRate(tau_s=5.0)
    rate.update(0.0)
    for i in range(1, 101):
        rate.add(10)
        per_s = rate.update(i * 0.5)
    assert per_s == pytest.approx(20, rel=0.01)
    assert rate.update(500.0) == pytest.approx(0, abs=1e-6)


def test_the_rate_starts_with_the_first_interval() -> None:
    rate = ArrivalRate()
    rate.add(1000)
    assert rate.update(7.0) == 0.0, "the interval is unknown"
    assert rate.update(7.0) == 0.0
