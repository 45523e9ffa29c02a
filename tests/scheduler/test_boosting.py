"""Urgent requests: near their deadline, or waiting for too long."""

import asyncio

import pytest
from structlog.testing import capture_logs

from scheduler.deadlines import boosted_priorities, count_missing, urgencies
from scheduler.request_state import RequestState
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler.builders import FAST, make_decode, make_state, make_tiers, ran
from tests.scheduler.world import World, played_by, run_world

TIERS = make_tiers(batch={"urgent_ms": 10_000, "aging_ms": 60_000})


def test_a_part_of_a_job_is_urgent_by_its_deadline_and_its_own_horizon() -> None:
    """The deadline already leaves time for the work, so that a large `max_tokens` does not make it urgent."""
    states = [
        make_decode(
            f"in {left_ms}",
            "batch",
            tiers=TIERS,
            max_tokens=100_000,
            deadline_ms=EPOCH_MS + left_ms,
            urgent_ms=urgent_ms,
        )
        for left_ms, urgent_ms in ((9_000, 4_000), (1_000, 4_000), (5_000, 60_000))
    ]
    found = urgencies(TIERS["batch"], states, FAST, 0.0)
    assert found == {"in 1000": pytest.approx(0.75), "in 5000": pytest.approx(0.5)}, "the tier's horizon is the longest"


def test_a_long_wait_for_the_first_token_is_urgent() -> None:
    states = [make_state("old", "batch", tiers=TIERS, deadline_ms=EPOCH_MS + 10**9)]
    assert not urgencies(TIERS["batch"], states, FAST, 59.0)
    assert urgencies(TIERS["batch"], states, FAST, 90.0) == {"old": pytest.approx(0.5)}


@pytest.mark.trap(9)
@pytest.mark.parametrize("urgent_ms", [0, 20_000])
def test_a_deadline_is_met_beside_a_flood_where_the_tier_has_a_horizon(urgent_ms: int) -> None:
    """Trap 9, with deadlines: strict priority alone would miss it."""

    async def story(world: World) -> bool:
        flood = [asyncio.create_task(_endless(world, i)) for i in range(40)]
        await world.clock.sleep(1.0)
        job = asyncio.create_task(world.ask("job", "batch", 64, 60))
        await world.clock.sleep(30.0)
        in_time = job.done()
        for task in (*flood, job):
            task.cancel()
        await asyncio.gather(*flood, job, return_exceptions=True)
        return in_time

    batch = {"urgent_ms": urgent_ms, "floor": 0.0, "deadline_ms": 30_000}
    tiers = make_tiers(batch=batch, realtime={"queue_limit": 1000})
    assert run_world(story, tiers=tiers, known=FAST) == bool(urgent_ms)


async def _endless(world: World, stream: int) -> None:
    for i in range(1_000_000):
        await world.ask(f"realtime-{stream}-{i}", prompt=200, max_tokens=20)


@played_by(run_world, tiers=make_tiers(batch={"urgent_ms": 20_000}), known=FAST)
async def test_an_urgent_request_goes_first_in_its_tier(world: World) -> None:
    tasks = [asyncio.create_task(world.ask(f"b{i}", "batch", 16, 200)) for i in range(6)]
    await world.clock.sleep(0.3)
    due_ms = world.clock.wall_ms() + 5_000
    tasks.append(asyncio.create_task(world.ask("due", "batch", 16, 100, deadline_ms=due_ms)))
    await world.clock.sleep(1.2)
    plans = [plan for at, plan in world.core.plans if at > 1.2 and "due" in ran(plan)]
    assert plans and all(plan.run[0].seq_id == "due" for plan in plans)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("num_flood", [20, 100])
@pytest.mark.parametrize(("tier", "urgent_ms"), [("bulk", 0), ("batch", 20_000)])
def test_a_deadline_of_its_own_is_met_in_a_tier_whose_slots_are_taken(
    tier: str, urgent_ms: int, num_flood: int
) -> None:
    """Also where the KV blocks are. The others of the tier go on for minutes."""

    async def story(world: World) -> float:
        flood = [asyncio.create_task(world.ask(f"b{i}", tier, 64, 440)) for i in range(num_flood)]
        await world.clock.sleep(5.0)
        begun_s, due_ms = world.clock.now(), world.clock.wall_ms() + 15_000
        await world.ask("job", tier, 64, 60, deadline_ms=due_ms)
        took_s = world.clock.now() - begun_s
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        return took_s

    assert run_world(story, tiers=make_tiers(**{tier: {"urgent_ms": urgent_ms}}), known=FAST) < 5.0


def test_a_deadline_of_its_own_counts_until_it_is_over_and_in_its_tier() -> None:
    def state(request_id: str, tier: str = "bulk", left_ms: int = 60_000, urgent_ms: int = 0) -> RequestState:
        deadline_ms = EPOCH_MS + left_ms
        return make_decode(request_id, tier, tiers=TIERS, deadline_ms=deadline_ms, urgent_ms=urgent_ms)

    states = [
        state("own"),
        state("tier's", left_ms=TIERS["bulk"].deadline_ms),
        state("batch", "batch"),
        state("urgent", "batch"),
        state("over", left_ms=4_000),
        state("part of a job", urgent_ms=1000),
        state("chat", "realtime", left_ms=5_000),
    ]
    found = boosted_priorities(TIERS.by_priority, states, ["urgent"], now=5.0)
    assert found == {"own": 10.5, "batch": 0.5, "urgent": 10.5}


def test_a_key_that_shares_a_tier_has_few_deadlines_of_its_own() -> None:
    """Or it would take all of the tier by a deadline for each of its requests."""
    flood = [make_state(f"a{i}", "bulk", owner="a", deadline_ms=EPOCH_MS + 1000 * (9 - i)) for i in range(6)]
    other = make_state("other", "bulk", owner="b", deadline_ms=EPOCH_MS + TIERS["bulk"].deadline_ms)
    assert boosted_priorities(TIERS.by_priority, flood, [], 0.0).keys() == {f"a{i}" for i in range(6)}
    assert boosted_priorities(TIERS.by_priority, [*flood, other], [], 0.0).keys() == {"a5", "a4", "a3", "a2"}


def test_requests_that_miss_their_deadlines_in_any_case_are_counted() -> None:
    """Ten tokens take at least 100 ms."""
    states = [
        make_decode(f"in {left_ms}", "batch", tiers=TIERS, max_tokens=11, deadline_ms=EPOCH_MS + left_ms)
        for left_ms in (-1000, 50, 60_000)
    ]
    assert count_missing(states, FAST, 0.0) == 2


@played_by(run_world, tiers=make_tiers(batch={"urgent_ms": 10_000}), known=FAST)
async def test_a_deadline_that_cannot_be_kept_is_logged_once_and_so_is_its_end(world: World) -> None:
    """It shows in the metrics meanwhile. Admission would refuse the job: it comes from elsewhere."""
    due_ms = world.clock.wall_ms() + 1000
    job = world.request("job", "batch", prompt=64, max_tokens=400, deadline_ms=due_ms)
    with capture_logs() as logs:
        await world.queue.put([job])
        await world.clock.sleep(2.0)
        assert world.prometheus.get_sample_value("tidegate_missing_deadlines", {"tier": "batch"}) == 1
        await world.clock.sleep(20.0)
        assert world.prometheus.get_sample_value("tidegate_missing_deadlines", {"tier": "batch"}) == 0
    said = [(log["event"], log["tier"]) for log in logs if log["event"].startswith("deadlines")]
    assert said == [("deadlines cannot be kept", "batch"), ("deadlines can be kept again", "batch")]
