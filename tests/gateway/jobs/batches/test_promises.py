"""Windows that can be promised: in what interactive tiers leave, and beside promises to other batches."""

import pytest

from gateway.jobs.batches.forecast.estimate import Range, Rates, Work
from gateway.jobs.batches.forecast.promises import PROMISED_SHARE, Commitment, earliest_promise_s, earliest_window_s

IDLE = (1.0, 1.0, 1.0, 1.0)


def promise_s(seconds: float, left_shares: tuple[float, ...] = IDLE, *promised: tuple[float, float]) -> float:
    """Return the earliest window for so many seconds of work, whose amount is known."""
    rates = Rates(1.0, 1.0, 1.0, 1.0, 0.0, left_shares=left_shares)
    work = Work(1, Range(seconds, seconds, seconds), Range(0, 0, 0))
    return earliest_promise_s(work, [Commitment(*entry) for entry in promised], rates)


@pytest.mark.parametrize("shares", [IDLE, (0.1, 0.5, 0.6, 0.9), (0.0, 0.0, 0.0, 0.1)])
def test_more_work_never_has_a_shorter_window(shares: tuple[float, ...]) -> None:
    windows = [promise_s(float(seconds), shares, (200, 50), (4000, 300)) for seconds in range(1, 2000, 7)]
    assert windows == sorted(windows)


def test_a_promise_to_another_batch_is_kept_in_the_same_share() -> None:
    half = (0.5,) * 4
    assert promise_s(9.0, half, (50, 9.0)) == pytest.approx(18.0 / PROMISED_SHARE), "it has time to wait"
    assert promise_s(9.0, half, (30, 9.0)) == pytest.approx(36.0 / PROMISED_SHARE), "it has not, so it goes first"
    assert promise_s(9.0, IDLE, (30, 9.0)) == pytest.approx(9.0 / PROMISED_SHARE)


@pytest.mark.parametrize(
    ("promised", "window_s"),
    [
        ([], 100),
        ([(50, 40)], 140),  # due sooner, so it goes first
        ([(1000, 400)], 100),  # has time to wait
        ([(450, 400)], 500),  # has not: the new one must come after it
        ([(450, 400), (520, 50)], 550),
        ([(10, 400)], 500),  # is lost anyway, but goes first
        ([(1000, 400), (1050, 600)], 1100),
    ],
)
def test_the_earliest_window_keeps_the_promises_to_others(promised: list[tuple[float, float]], window_s: float) -> None:
    assert earliest_window_s(100, [Commitment(*entry) for entry in promised]) == window_s


def test_a_batch_in_trouble_is_not_pushed_back_while_it_may_still_end_in_time() -> None:
    assert earliest_window_s(10, [Commitment(100, 60)], share=0.5) == 140, "in half of the engine it is late already"
