"""Estimates of a batch's time: tokens as ranges, and rates of workers."""

from dataclasses import replace

import pytest

from gateway.jobs.batches.forecast.estimate import (
    Lengths,
    Pace,
    Rates,
    Work,
    estimate,
    finish_times_s,
    rates_of,
    work_left,
)
from gateway.jobs.batches.input.size import InputSize
from gateway.jobs.batches.model import Batch, BatchStatus
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStatus

SIZE = InputSize(lines=100, choices=100, prompt_bytes=40_000, distinct_bytes=40_000, max_output=20_000)
BATCH = Batch("b", "/v1/completions", "f", "1h", BatchStatus.IN_PROGRESS, 0, 3600, total=100, size=SIZE)
RATES = Rates(prompt_per_s=100.0, output_per_s=50.0, whole_prompt_per_s=400.0, whole_output_per_s=200.0, step_s=0.01)
UNSEEN = Lengths()
SEEN = Lengths(choices=256, prompt_bytes=256 * 400, prompt_tokens=256 * 80, output_tokens=256 * 30)
CAPACITY = TierCapacity(
    step_s=0.01,
    prefill_tokens_per_s=100.0,
    output_tokens_per_s=50.0,
    whole_prefill_tokens_per_s=400.0,
    whole_output_tokens_per_s=200.0,
)


RATE_NAMES = (
    "prefill_tokens_per_s",
    "output_tokens_per_s",
    "whole_prefill_tokens_per_s",
    "whole_output_tokens_per_s",
)


def worker(capacity: TierCapacity | None = CAPACITY) -> WorkerStatus:
    return WorkerStatus("w", ("m",), 4096, 1000, 0, tiers={"batch": TierStatus(capacity=capacity)})


def left(batch: Batch = BATCH, lengths: Lengths = UNSEEN) -> Work:
    work = work_left(batch, lengths, context=4096)
    assert work is not None
    return work


def test_nothing_seen_yet_is_a_guess_within_wide_bounds() -> None:
    work = left()
    assert (work.prompt_tokens.low, work.prompt_tokens.expected, work.prompt_tokens.high) == (5000, 10_000, 20_000)
    assert (work.output_tokens.low, work.output_tokens.expected, work.output_tokens.high) == (100, 20_000, 20_000)


def test_a_batch_that_runs_is_judged_by_its_own_lines() -> None:
    batch = replace(BATCH, completed=50, input_tokens=50 * 90, cached_tokens=50 * 45, output_tokens=50 * 10)
    work = left(batch, SEEN)
    assert work.lines == 50
    assert (work.prompt_tokens.expected, work.output_tokens.expected) == (50 * 45, 500)
    assert 1 < work.output_tokens.high / 500 < 1.5


def test_outputs_stay_within_what_the_requests_allow() -> None:
    eager = replace(SIZE, min_output=10_000, max_output=10_000)
    output = left(replace(BATCH, size=eager), SEEN).output_tokens
    assert output.low == output.expected == output.high == 10_000
    endless = replace(SIZE, max_output=0, unlimited=100)
    assert left(replace(BATCH, size=endless)).output_tokens.high == 100 * 4096


def test_rates_are_those_of_all_workers_or_not_known() -> None:
    rates = rates_of([worker(), worker()], "batch")
    assert rates is not None and (rates.prompt_per_s, rates.whole_output_per_s, rates.step_s) == (200, 400, 0.01)
    assert rates_of([], "batch") is None
    assert rates_of([worker(), worker(None)], "batch") is None
    for rate in RATE_NAMES:  # 0 is "not known"
        assert rates_of([worker(), worker(replace(CAPACITY, **{rate: 0.0}))], "batch") is None


def test_workers_count_by_their_rates_in_what_interactive_tiers_leave() -> None:
    idle = replace(worker(replace(CAPACITY, whole_output_tokens_per_s=600.0)), left_shares=(0.9, 1.0, 1.0, 1.0))
    busy = replace(worker(), left_shares=(0.1, 0.2, 0.4, 0.4))
    rates = rates_of([idle, busy], "batch")
    assert rates is not None and rates.left_shares == pytest.approx((0.7, 0.8, 0.85, 0.85))
    unknown = rates_of([worker()], "batch")
    assert unknown is not None and unknown.left_shares == (0.25,) * 4, "the present share"


def test_the_earliest_end_is_the_least_work_with_the_whole_engine() -> None:
    found = estimate(left(lengths=SEEN), [], RATES, None)
    assert found is not None and found.basis == "capacity"
    assert found.finish_s == 8000 / 100 + 3000 / 50
    assert found.earliest_s == pytest.approx(6400 / 400 + 1500 / 200)
    assert found.latest_s > 10_000 / 100 + 6000 / 50, "the most work, and perhaps at lower rates"


def test_other_batches_come_before_the_end_as_far_as_they_are_not_longer() -> None:
    work = left(lengths=SEEN)
    alone = estimate(work, [], RATES, None)
    half = Work(50, work.prompt_tokens.times(0.5), work.output_tokens.times(0.5))
    double = Work(200, work.prompt_tokens.times(2), work.output_tokens.times(2))
    shared = estimate(work, [half, double], RATES, None)
    assert alone is not None and shared is not None
    assert shared.finish_s == 2.5 * alone.finish_s
    assert shared.latest_s == 3.5 * alone.latest_s and shared.earliest_s == alone.earliest_s
    paces = [None, Pace(0.5, 55.0, lines_seen=400), None]
    assert finish_times_s([work, half, double], paces, RATES) == [2.5 * alone.finish_s, 100, 3.5 * alone.finish_s]
    assert finish_times_s([work, half, double], paces, None) == [None, 100, None]


def test_a_batch_that_has_a_pace_goes_on_with_it() -> None:
    found = estimate(left(lengths=SEEN), [left()], RATES, Pace(0.5, 55.0, lines_seen=400))
    assert found is not None and (found.basis, found.finish_s) == ("measured", 200)
    assert found.earliest_s < 200 < found.latest_s < 250
    unsure = estimate(left(lengths=SEEN), [], None, Pace(0.5, 55.0, lines_seen=3))
    assert unsure is None
