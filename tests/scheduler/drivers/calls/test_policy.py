"""When a batch starts and who is in it, in virtual time."""

import pytest

from scheduler.config import load_tiers, shipped_tiers_path
from scheduler.drivers.calls.policy import (
    ISOLATED_EVERY,
    MANY_ISOLATED_EVERY,
    MAX_ISOLATED_BATCHES,
    MAX_WAIT_S,
    MIN_WAIT_S,
    BatchPolicy,
    CallPlan,
    LaneWait,
    Wait,
)
from tests.scheduler.builders import make_tiers
from tests.scheduler.drivers.calls.simulation import poisson, simulate

TIERS = load_tiers(shipped_tiers_path())
BATCH = 64
CALL_S = 0.2
CAPACITY_PER_S = BATCH / CALL_S


def test_a_full_batch_starts_at_once() -> None:
    policy = BatchPolicy(TIERS, BATCH, now=0.0)
    assert policy.decide({"bulk": LaneWait(BATCH, 0.0)}, now=0.0) == CallPlan({"bulk": BATCH})


def test_a_single_task_waits_as_long_as_a_quiet_batch_does() -> None:
    policy = BatchPolicy(TIERS, BATCH, now=0.0)
    waiting = {"realtime": LaneWait(1, 10.0)}
    policy.observe(waiting, 10.0)
    assert policy.decide(waiting, 10.0) == Wait(pytest.approx(10.0 + MIN_WAIT_S, abs=1e-3))
    assert policy.decide(waiting, 10.0 + MIN_WAIT_S + 1e-3) == CallPlan({"realtime": 1})


def test_the_wait_grows_with_the_arrivals_up_to_its_limit() -> None:
    quiet = simulate(TIERS, BATCH, 0.01, {"bulk": list(poisson(5, 20, seed=1))})
    busy = simulate(TIERS, BATCH, 0.01, {"bulk": list(poisson(300, 20, seed=1))})
    flood = simulate(TIERS, BATCH, 0.01, {"bulk": list(poisson(3000, 20, seed=1))})
    waits = [sum(run.waits_s) / len(run.waits_s) for run in (quiet, busy, flood)]
    assert MIN_WAIT_S <= waits[0] < waits[1] < waits[2] <= MAX_WAIT_S
    assert waits[0] == pytest.approx(MIN_WAIT_S, abs=0.003)
    assert waits[2] == pytest.approx(MAX_WAIT_S, abs=0.003)


@pytest.mark.parametrize("seed", range(3))
def test_p99_is_within_500_ms_at_80_percent_of_the_capacity(seed: int) -> None:
    run = simulate(TIERS, BATCH, CALL_S, {"realtime": list(poisson(0.8 * CAPACITY_PER_S, 60, seed))})
    assert run.p99_s("realtime") <= 0.5
    assert run.efficiency > 0.8 * BATCH  # waiting makes calls fuller than the load alone


@pytest.mark.parametrize("seed", range(3))
def test_interactive_keeps_its_slo_beside_endless_bulk_and_batches_are_full(seed: int) -> None:
    arrivals = {"realtime": list(poisson(0.4 * CAPACITY_PER_S, 30, seed)), "bulk": [0.0] * int(20 * CAPACITY_PER_S)}
    run = simulate(TIERS, BATCH, CALL_S, arrivals)
    assert run.p99_s("realtime") <= 0.5
    assert run.efficiency > 0.9 * BATCH


def test_interactive_tasks_come_first_and_bulk_fills_what_is_left() -> None:
    waiting = {"realtime": LaneWait(50, 0.0), "bulk": LaneWait(1000, 0.0), "batch": LaneWait(1000, 0.0)}
    plan = BatchPolicy(TIERS, BATCH, now=0.0).decide(waiting, now=0.0)
    assert isinstance(plan, CallPlan)
    assert plan.limits == {"realtime": 50, "bulk": 14, "batch": 0}


def test_a_flood_from_above_leaves_bulk_its_min_share() -> None:
    tiers = make_tiers(bulk={"floor": 0.1}, batch={"floor": 0})
    flood = {"realtime": [0.0] * 12_000, "bulk": [0.0] * 3_000}
    run = simulate(tiers, BATCH, CALL_S, flood)
    under_flood = [batch for batch in run.batches if batch.get("realtime")][:150]
    share = sum(batch.get("bulk", 0) for batch in under_flood) / (BATCH * len(under_flood))
    assert share == pytest.approx(0.1, abs=0.02)


def test_guarantees_together_never_exceed_a_batch() -> None:
    """Tiers that got nothing during a very long call are owed more than a batch, each of them."""
    tiers = make_tiers(bulk={"floor": 0.3}, batch={"floor": 0.3})
    policy = BatchPolicy(tiers, BATCH, now=0.0)
    waiting = {tier.name: LaneWait(10 * BATCH, 0.0) for tier in tiers.by_priority}
    for took_s in [0.001] * 50 + [30.0]:
        policy.end_call(CallPlan({"realtime": BATCH}), {"realtime": BATCH}, waiting, took_s, 0.0)
    for _ in range(50):
        plan = policy.decide(waiting, now=1.0)
        assert isinstance(plan, CallPlan)
        assert sum(plan.limits.values()) == BATCH
        policy.end_call(plan, plan.limits, waiting, 0.001, 1.0)


@pytest.mark.parametrize(("count", "every"), [(100, ISOLATED_EVERY), (500, MANY_ISOLATED_EVERY)])
def test_isolated_tasks_get_a_share_of_the_calls_while_others_wait(count: int, every: int) -> None:
    policy, plans = BatchPolicy(TIERS, BATCH, now=0.0), []
    waiting = {"realtime": LaneWait(BATCH, 0.0), "bulk.2": LaneWait(count, 0.0), "bulk.3": LaneWait(1, 0.0)}
    policy.observe(waiting, 0.0)
    for step in range(2 * every):
        plan = policy.decide(waiting, now=float(step))
        assert isinstance(plan, CallPlan)
        plans.append(plan)
        policy.end_call(plan, {}, {}, 1.0, float(step))
    isolated = [plan for plan in plans if plan.is_isolated]
    assert [plan.limits for plan in isolated] == [{"bulk.3": 1}] * 2


def test_many_failed_calls_end_isolation() -> None:
    policy = BatchPolicy(TIERS, BATCH, now=0.0)
    policy.observe({"bulk.2": LaneWait(BATCH, 0.0)}, 0.0)
    assert policy.may_isolate
    policy.observe({"bulk.2": LaneWait(MAX_ISOLATED_BATCHES * BATCH, 0.0)}, 0.0)
    assert not policy.may_isolate


def test_the_slo_shortens_the_wait_after_a_slow_call() -> None:
    policy = BatchPolicy(TIERS, BATCH, now=0.0)
    policy.end_call(CallPlan({}), {}, {}, took_s=0.3, now=0.3)
    slack_s = 0.9 * 0.5 - 0.3
    assert policy.decide({"realtime": LaneWait(3, 0.1)}, now=0.25) == Wait(pytest.approx(0.1 + slack_s))
    assert isinstance(policy.decide({"realtime": LaneWait(3, 0.1)}, now=0.3), CallPlan)
