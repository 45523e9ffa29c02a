"""What a worker announces that it can do: rates from the step-time model, less the use of the tiers above."""

from dataclasses import replace

import pytest

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.regression import WARM_STEPS
from scheduler.holdings.capacity import CapacityEstimator
from scheduler.holdings.report import Ended
from scheduler.registry.worker_status import TierCapacity
from scheduler.request import Claimed
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler.builders import CheckedCore, make_core, make_info, make_request
from tests.scheduler.stepped_core import SteppedCore

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.002)


def measure(
    estimator: CapacityEstimator, core: CheckedCore, now: float = 1.0, times: int = 1
) -> dict[str, TierCapacity]:
    for _ in range(times):
        capacities = estimator.measure(core.held.tiers, core.held.states, core.status(now), interval_s=1.0)
    return capacities


def make_estimator(cost: StepCost = COST) -> tuple[CapacityEstimator, CheckedCore]:
    info = make_info(max_step_tokens=1000)
    return CapacityEstimator(info), make_core(info=info, cost=cost)


def hold(core: CheckedCore, count: int, tier: str = "realtime", prompt: int = 100, max_tokens: int = 50) -> None:
    requests = [make_request(f"{tier}-{n}", tier, prompt, max_tokens) for n in range(count)]
    core.held.accept([Claimed(request, fence=1) for request in requests], 0.0, EPOCH_MS)


def end(estimator: CapacityEstimator, count: int, tier: str = "realtime", **more: int) -> None:
    ended = Ended(tier, "stop", prompt_tokens=100, output_tokens=50, met_slo=True)
    for _ in range(count):
        estimator.note_ended(replace(ended, **more))  # type: ignore[arg-type]


def test_an_idle_engine_prefills_in_full_steps() -> None:
    estimator, core = make_estimator()
    capacity = measure(estimator, core)["realtime"]
    assert capacity.prefill_tokens_per_s == pytest.approx(1000 / (0.01 + 1.0))
    assert (capacity.prompt_tokens, capacity.output_tokens, capacity.slots_free) == (0, 0, 64)
    assert capacity.step_s == pytest.approx(0.01)


def test_a_rate_is_not_announced_after_too_few_steps() -> None:
    """A prior, or a fit to a few equal steps, may be so wrong that requests are refused which could be served."""
    info = make_info(max_step_tokens=1000)
    estimator, core = CapacityEstimator(info), make_core(info=info, cost=None)
    rates = []
    for _ in range(WARM_STEPS + 1):
        rates.append(measure(estimator, core)["realtime"].prefill_tokens_per_s)
        core.step_time.observe(StepWork(prefill_tokens=100, attended=5000, prefills=1), 0.1)
    assert set(rates) == {0.0}
    assert measure(estimator, core)["realtime"].prefill_tokens_per_s > 0


def test_prefills_run_beside_decodes_as_far_as_their_slo_allows() -> None:
    """85 ms of an ITL SLO of 100 ms may be used; ten decodes and the fixed cost of the step take 30 of them."""
    estimator, core = make_estimator()
    hold(core, 10, prompt=10)
    SteppedCore(core, COST).step()
    capacity = measure(estimator, core)["realtime"]
    assert capacity.step_s == pytest.approx(0.01 + 10 * 0.002)
    assert capacity.prefill_tokens_per_s == pytest.approx(0.055 / 0.085 / 0.001)
    assert capacity.output_tokens == 10 * 49 and capacity.prompt_tokens == 0


def test_backlog_of_higher_tiers_counts_for_lower_ones_but_not_the_other_way_round() -> None:
    estimator, core = make_estimator()
    hold(core, 3, "realtime")
    hold(core, 2, "bulk")
    capacities = measure(estimator, core, now=0.1)
    assert [capacities[t].prompt_tokens for t in ("realtime", "bulk", "batch")] == [300, 500, 500]
    assert [capacities[t].output_tokens for t in ("realtime", "bulk", "batch")] == [150, 250, 250]
    assert [capacities[t].slots_free for t in ("realtime", "bulk", "batch")] == [61, 62, 64]
    late = measure(estimator, core, now=1.0)
    assert [late[t].prompt_tokens for t in ("realtime", "bulk", "batch")] == [300, 500, 500], (
        "late prompts are served in order, so they are ahead of newcomers"
    )


def test_tiers_without_an_slo_have_the_time_that_is_left() -> None:
    """The time left is what the tiers above did not use lately, and never less than the min share."""
    estimator, core = make_estimator()
    alone = measure(estimator, core)["bulk"]
    assert alone.prefill_tokens_per_s == pytest.approx(1000, rel=0.02)
    assert alone.output_tokens_per_s == pytest.approx(1 / (0.002 + 0.01 / 64))
    for _ in range(100):
        core.held.used_s["realtime"] += 0.63
        measure(estimator, core)
    core.held.used_s["realtime"] += 0.63
    third = measure(estimator, core)["bulk"]
    assert third.prefill_tokens_per_s == pytest.approx(1000 * 0.37, rel=0.05)
    for _ in range(100):
        core.held.used_s["realtime"] += 1.0
        measure(estimator, core)
    core.held.used_s["realtime"] += 1.0
    assert measure(estimator, core)["bulk"].prefill_tokens_per_s == pytest.approx(1000 * 0.02, rel=0.02), (
        "its min share"
    )


def test_slots_become_free_as_fast_as_a_full_batch_computes_requests() -> None:
    """A prompt of 100 tokens takes 0.1 s; 50 outputs take 2 ms each, and their part of the fixed cost of steps."""
    estimator, core = make_estimator()
    assert measure(estimator, core)["realtime"].drain_per_s == 0, "no output is known"
    end(estimator, 1)
    assert measure(estimator, core)["realtime"].drain_per_s == pytest.approx(1 / (0.1 + 50 * (0.002 + 0.01 / 64)))


def test_until_a_request_has_ended_the_running_ones_stand_for_it() -> None:
    estimator, core = make_estimator()
    hold(core, 4, prompt=10)
    stepped, drains = SteppedCore(core, COST), []
    for _ in range(3):
        stepped.step()
        drains.append(measure(estimator, core)["realtime"].drain_per_s)
    assert drains[0] > drains[1] > drains[2] > 0, "longer and longer answers"


def test_rates_are_bounded_by_the_tokens_of_a_step_where_work_seems_to_cost_nothing() -> None:
    estimator, core = make_estimator(
        StepCost(step_s=0.01, prefill_token_s=0.0, attend_s=0.0, context_token_s=0.0, decode_s=0.0)
    )
    capacities = measure(estimator, core)
    for tier in ("realtime", "bulk"):
        assert capacities[tier].prefill_tokens_per_s == pytest.approx(1000 / 0.01)


def test_the_whole_engine_gives_more_than_what_higher_tiers_leave() -> None:
    estimator, core = make_estimator()
    idle = measure(estimator, core)["bulk"]
    assert idle.whole_prefill_tokens_per_s == pytest.approx(idle.prefill_tokens_per_s)
    core.held.used_s["realtime"] = 0.0
    for _ in range(100):
        core.held.used_s["realtime"] += 0.75
        busy = measure(estimator, core)["bulk"]
    assert busy.prefill_tokens_per_s == pytest.approx(0.25 * idle.prefill_tokens_per_s, rel=0.01)
    assert busy.whole_prefill_tokens_per_s == idle.whole_prefill_tokens_per_s
    assert busy.whole_output_tokens_per_s == idle.whole_output_tokens_per_s >= 4 * busy.output_tokens_per_s * 0.99


def test_the_length_of_answers_follows_max_tokens() -> None:
    """After short answers, long ones are held: their slots become free as much later."""
    estimator, core = make_estimator()
    end(estimator, 20, prompt_tokens=10, output_tokens=40, max_tokens=50)
    hold(core, 64, prompt=10, max_tokens=50)
    short_per_s = measure(estimator, core)["realtime"].drain_per_s
    long_estimator, long_core = make_estimator()
    end(long_estimator, 20, prompt_tokens=10, output_tokens=40, max_tokens=50)
    hold(long_core, 64, prompt=10, max_tokens=1500)
    assert measure(long_estimator, long_core)["realtime"].drain_per_s < short_per_s / 20
