"""Forecasts from rates, held and waiting work, and the age of heartbeats."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.client.fair_order import TokenCosts
from scheduler.client.inflight import TierUsage
from scheduler.client.ttft_forecast import STALE_S, Forecast, Heartbeats, completion, first_token
from scheduler.queue.base import Backlog
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStatus
from tests.scheduler.builders import make_request

CAPACITY = TierCapacity(
    prompt_tokens=200,
    output_tokens=1000,
    step_s=0.02,
    slots_free=3,
    drain_per_s=4.0,
    prefill_tokens_per_s=1000.0,
    output_tokens_per_s=500.0,
)
seconds = st.floats(0, 10)
counts = st.integers(0, 10_000)


def status(
    worker_id: str = "w", capacity: TierCapacity | None = CAPACITY, *, at_ms: int = 0, slots: int = 8
) -> WorkerStatus:
    tiers = {"realtime": TierStatus(batch_size=slots, capacity=capacity)}
    return WorkerStatus(worker_id, ("m",), 512, 1000, 0, tiers=tiers, at_ms=at_ms)


def heartbeats(*statuses: WorkerStatus) -> Heartbeats:
    known = Heartbeats()
    known.update(statuses, now=0.0, wall_ms=0)
    return known


# -- a first token -------------------------------------------------------------------------------------------------


def test_a_first_token_comes_after_held_work_waiting_work_and_the_own_prompt() -> None:
    forecast = first_token([make_request(prompt=50)], CAPACITY, 8, TierUsage(), target_s=1.0)
    assert forecast.own_s == pytest.approx(0.02 + 0.05)
    assert forecast.seconds(Backlog()) == pytest.approx(0.07 + 0.2)
    assert forecast.seconds(Backlog(1, 300, 9999)) == pytest.approx(0.07 + 0.2 + 0.3), (
        "outputs take no time of their own"
    )


@pytest.mark.trap(15)
def test_trap_15_a_first_token_waits_for_all_n_choices() -> None:
    one, eight = (
        first_token([make_request(f"r{i}", prompt=50) for i in range(n)], CAPACITY, 64, TierUsage(), 9.0)
        for n in (1, 8)
    )
    assert eight.own_s - one.own_s == pytest.approx(7 * 0.05)
    assert one.slots_free - eight.slots_free == 7


def test_requests_beyond_the_free_slots_wait_for_the_drain_rate() -> None:
    forecast = first_token([make_request(prompt=0)], CAPACITY, 8, TierUsage(), 1.0)
    assert forecast.slots_free == 2
    assert forecast.wait_s(Backlog(2, 0, 0)) == pytest.approx(0.2)
    assert forecast.wait_s(Backlog(6, 0, 0)) == pytest.approx(1.0), "four more, at four per second"


def test_a_request_too_long_for_the_slo_is_admitted_when_little_waits() -> None:
    """It can never be in time. Otherwise it would be rejected for ever."""
    forecast = first_token(
        [make_request(prompt=400)] * 64, replace(CAPACITY, prompt_tokens=0, slots_free=8), 8, TierUsage(), 0.5
    )
    assert forecast.own_s == 0.25 and not forecast.is_complete
    assert forecast.limit(()).admits(Backlog())
    assert forecast.limit(()).admits(Backlog(0, 249, 0))
    assert not forecast.limit(()).admits(Backlog(0, 251, 0))


forecasts = st.builds(
    Forecast,
    target_s=seconds,
    own_s=seconds,
    held_s=seconds,
    prompt_token_s=st.floats(1e-6, 1),
    output_token_s=st.floats(0, 1),
    slots_free=st.floats(-9, 9),
    drain_per_s=st.just(0.0) | st.floats(0.01, 9),
)


@given(forecasts, st.builds(Backlog, counts, counts, counts))
def test_exactly_the_requests_predicted_to_be_in_time_are_admitted(forecast: Forecast, ahead: Backlog) -> None:
    if math.isclose(forecast.seconds(ahead), forecast.target_s, rel_tol=1e-6, abs_tol=1e-6):
        return  # rounding decides
    assert forecast.limit(()).admits(ahead) == (forecast.seconds(ahead) <= forecast.target_s)


# -- a deadline ----------------------------------------------------------------------------------------------------


def test_completion_counts_outputs_by_their_usual_share() -> None:
    requests = [make_request("r", "bulk", prompt=100, max_tokens=1000)]
    forecast = completion(requests, CAPACITY, TierUsage(output_share=0.25), left_s=60, cap_own_work=False)
    assert forecast.output_token_s == pytest.approx(0.25 / 500)
    assert forecast.held_s == pytest.approx(200 / 1000 + 1000 * 0.25 / 500)
    assert forecast.own_s == pytest.approx(0.02 + 250 * 0.02), "one sequence cannot go faster than its steps"


@pytest.mark.parametrize(
    ("capacity", "usage"),
    [(CAPACITY, TierUsage()), (replace(CAPACITY, output_tokens_per_s=0.0, step_s=0.0), TierUsage(output_share=0.5))],
)
def test_outputs_without_a_known_share_or_rate_count_nothing(capacity: TierCapacity, usage: TierUsage) -> None:
    forecast = completion([make_request("r", "bulk", max_tokens=10**6)], capacity, usage, 60, cap_own_work=False)
    assert forecast.output_token_s == 0 and forecast.own_s < 0.1


def test_only_the_callers_own_deadline_makes_long_work_too_late() -> None:
    requests = [make_request("r", "bulk", prompt=100, max_tokens=4000)]
    own, tiers = (
        completion(requests, CAPACITY, TierUsage(output_share=1.0), 60, cap_own_work=s) for s in (False, True)
    )
    assert not own.limit(()).admits(Backlog()) and own.own_s > 60
    assert tiers.limit(()).admits(Backlog())


# -- heartbeats ----------------------------------------------------------------------------------------------------


def test_rates_of_several_workers_add_up() -> None:
    together = heartbeats(status("a"), status("b"))
    capacity = together.capacity("realtime", 0.0)
    assert capacity is not None
    assert (capacity.prompt_tokens, capacity.slots_free, capacity.step_s) == (400, 6, 0.02)
    assert (capacity.prefill_tokens_per_s, capacity.output_tokens_per_s, capacity.drain_per_s) == (2000, 1000, 8)
    assert together.slots("realtime") == 16


def test_the_costs_of_tokens_are_those_of_a_tier_that_has_all_workers() -> None:
    whole = replace(CAPACITY, whole_prefill_tokens_per_s=4000.0, whole_output_tokens_per_s=500.0)
    both = heartbeats(status("a", whole), status("b", whole))
    assert both.token_costs("realtime", now=0.0) == TokenCosts(prompt_ms=0.125, output_ms=1.0)
    for unknown in (heartbeats(status()), heartbeats()):
        assert unknown.token_costs("realtime", now=0.0) == TokenCosts()


@pytest.mark.trap(8)
def test_trap_8_an_old_heartbeat_is_not_used() -> None:
    known = heartbeats(status())
    for second in range(1, 10):
        known.update([status()], now=float(second), wall_ms=1000 * second)
    assert known.capacity("realtime", STALE_S - 0.01) is not None
    assert known.capacity("realtime", STALE_S + 0.01) is None
    known.update([status(at_ms=10_000)], now=10.0, wall_ms=10_000)
    assert known.capacity("realtime", 10.0) is not None


@pytest.mark.trap(8)
@pytest.mark.parametrize(
    "capacity",
    [None, replace(CAPACITY, prefill_tokens_per_s=0.0)],
)
def test_trap_8_one_worker_without_a_capacity_makes_the_sum_unknown(capacity: TierCapacity | None) -> None:
    assert heartbeats(status("a"), status("b", capacity)).capacity("realtime", 0.0) is None
