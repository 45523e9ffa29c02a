"""Quantiles, intervals and ratios from samples whose truth is known."""

import numpy as np
import pytest

from loadtest.client.answer import Outcome
from loadtest.client.runner import UNFINISHED, ArmRun
from loadtest.estimates import Distribution, harvest, harvest_limit, ratio, summarize


def exponential(scale: float, count: int, seed: int) -> Distribution:
    return Distribution(np.random.default_rng(seed).exponential(scale, count))


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    q, truth = 0.95, -np.log(0.05)
    held = 0
    for seed in range(20):
        estimate = exponential(1.0, 300, seed).quantile(q)
        assert estimate is not None
        held += estimate.low <= truth <= estimate.high
    assert held >= 16  # of 20; 19 expected


def test_nothing_measured_has_no_quantile_and_no_ratio() -> None:
    empty = Distribution(np.array([]))
    assert empty.quantile(0.5) is None and empty.max is None
    assert ratio(empty, exponential(1.0, 10, 1), 0.5) is None


def test_harvest_is_measured_against_what_interactive_leaves() -> None:
    assert harvest(80.0, 100.0, 0.2) == pytest.approx(1.0)
    assert harvest(60.0, 100.0, 0.2) == pytest.approx(0.75)
    assert harvest(60.0, 100.0, None) is None
    assert harvest(60.0, 100.0, 1.0) is None


def test_the_limit_of_the_harvest() -> None:
    assert [harvest_limit(s, 0.58, 1.08) for s in (1.25, 1.5, 2, 4)] == pytest.approx(
        [0.48, 0.53, 0.62, 0.82], abs=0.01
    )
    assert harvest_limit(1.0, 0.58, 1.08) == pytest.approx(0.42)  # what is left
    assert harvest_limit(2.0, 0.0) == 1.0
    assert harvest_limit(2.0, 0.7, 3.3) == 1.0  # no more than all


def test_a_summary_counts_what_was_in_play_in_the_window() -> None:
    def outcome(due_s: float, error: str | None = None) -> Outcome:
        made = Outcome("chat", 0, due_s, sent_s=due_s, error=error, service_tier="default")
        made.progress = [(due_s + 0.1, 1), (due_s + 0.2, 3)]
        made.finished_s = due_s + 0.3
        return made

    outcomes = [
        outcome(9.0),
        outcome(9.8),
        outcome(10.0),
        outcome(11.0),
        outcome(12.0, "429: no"),
        outcome(13.0, UNFINISHED),
    ]
    summary = summarize([ArmRun(start_s=10.0, duration_s=5.0, outcomes={"chat": outcomes})], "chat")
    assert (summary.offered, summary.completed, summary.errors, summary.unfinished) == (5, 3, 1, 1)
    assert summary.tokens_per_s == pytest.approx((2 + 4 * 3) / 5.0)  # of 9.8 two came in the window
    assert summary.ttft.samples == pytest.approx([0.1] * 4)
    assert summary.error_examples == ("429: no",)
    assert summary.answered_as == ("default",)
