"""The share of the engine that interactive tiers leave, in the busiest stretch of the last hour."""

import pytest

from scheduler.holdings.capacity import INTERVAL_S, SpareShare
from scheduler.registry.worker_status import LEFT_STRETCHES_S

BEAT_S = 0.5


class Load:
    """Interactive load on a worker that sends heartbeats."""

    def __init__(self) -> None:
        self.measured = SpareShare()
        self._interactive_s = 0.0

    def run(self, seconds: float, share: float) -> tuple[float, ...]:
        for _ in range(round(seconds / BEAT_S)):
            self._interactive_s += share * BEAT_S
            self.measured.add(self._interactive_s, BEAT_S)
        return self.measured.shares


def test_nothing_is_known_before_the_first_interval_ends() -> None:
    load = Load()
    assert load.run(INTERVAL_S - BEAT_S, 0.5) == ()
    assert load.run(BEAT_S, 0.5) == pytest.approx([0.5] * len(LEFT_STRETCHES_S))


def test_what_is_taken_now_follows_within_seconds() -> None:
    load = Load()
    assert load.measured.recent is None
    load.run(60, 0.1)
    assert load.measured.recent == pytest.approx(0.1, abs=0.01)
    load.run(10, 0.7)
    assert load.measured.recent == pytest.approx(0.7, abs=0.1)


def test_the_busiest_minute_counts_for_a_minute_and_the_mean_for_an_hour() -> None:
    load = Load()
    load.run(1800, 0.1)
    load.run(60, 0.7)
    load.run(1740, 0.1)
    busiest = [(60, 0.7), (300, (60 * 0.7 + 240 * 0.1) / 300), (900, (42 + 84) / 900), (3600, (42 + 354) / 3600)]
    assert [stretch_s for stretch_s, _ in busiest] == list(LEFT_STRETCHES_S)
    assert load.measured.shares == pytest.approx([1 - taken for _, taken in busiest])


def test_a_busy_time_is_forgotten_after_an_hour() -> None:
    load = Load()
    load.run(600, 0.9)
    assert load.run(3600, 0.2) == pytest.approx([0.8] * len(LEFT_STRETCHES_S))


def test_longer_stretches_leave_no_less() -> None:
    load = Load()
    for minute in range(90):
        shares = load.run(60, (minute * 7 % 10) / 10)
        assert list(shares) == sorted(shares)
