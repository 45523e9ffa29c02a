"""A real-time arrival is in the very next step, and the bulk evicted for it loses no token."""

import asyncio

import pytest

from engine.interface import StepEviction, StepPlan
from tests.scheduler.builders import FAST, expected_tokens, fixed, make_info, make_tiers, ran
from tests.scheduler.world import World, played_by, run_world

LONG_STEP = [f"b{i}" for i in range(40)]  # 0.01 + 40 · 0.0005 s a step and more


async def _bulk(world: World) -> list[asyncio.Task[object]]:
    tasks = [asyncio.create_task(world.ask(name, "bulk", 32, 40)) for name in LONG_STEP]
    await world.clock.sleep(0.5)  # all of them decode
    return tasks  # type: ignore[return-value]


async def _until_a_step_begins(world: World) -> None:
    """Return a little after the next step has begun."""
    num_plans = len(world.core.plans)
    while len(world.core.plans) == num_plans:
        await world.clock.sleep(0.0005)


def _next_plan(world: World, now: float) -> StepPlan:
    return next(plan for at, plan in world.core.plans if at > now)


@pytest.mark.parametrize("step_eviction", [StepEviction.STEPS, StepEviction.ROWS])
def test_an_arrival_ends_the_running_step_early_and_its_bulk_comes_back_in_order(
    step_eviction: StepEviction,
) -> None:
    async def story(world: World) -> None:
        bulk = await _bulk(world)
        await _until_a_step_begins(world)
        step_s = world.core.results[-1].elapsed_s
        before = [run.seq_id for run in world.core.plans[-1][1].run]
        arrived_s = world.clock.now()
        asked = asyncio.create_task(world.ask("rt", max_tokens=3))
        await world.clock.sleep(step_s)
        [evicted] = [r for r in world.core.results if r.evicted]
        assert set(evicted.evicted) == set(before) and evicted.elapsed_s < 0.5 * step_s
        assert all(not output.token_ids for output in evicted.outputs)
        await asked
        await asyncio.gather(*bulk)
        later = [run.seq_id for at, plan in world.core.plans if at > arrived_s for run in plan.run]
        assert [name for name in dict.fromkeys(later) if name in before] == before

    run_world(story, known=FAST, info=make_info(step_eviction=step_eviction))


@played_by(
    run_world,
    known=FAST,
    info=make_info(step_eviction=StepEviction.ROWS),
    tiers=make_tiers(realtime={"max_slowdown": 4}),
)
async def test_bulk_is_evicted_from_a_step_that_interactive_decodes_finish(world: World) -> None:
    bulk = await _bulk(world)
    first = asyncio.create_task(world.ask("rt0", max_tokens=60))
    await world.clock.sleep(0.2)
    await _until_a_step_begins(world)
    second = await world.ask("rt1", max_tokens=2)
    [*_, evicted] = [r for r in world.core.results if r.evicted]
    assert [o.seq_id for o in evicted.outputs if o.token_ids] == ["rt0"]
    assert (await first).token_ids == expected_tokens(first.result().request)
    assert second.token_ids == expected_tokens(second.request)
    await asyncio.gather(*bulk)


@pytest.mark.trap(2)
@pytest.mark.parametrize(("slots", "evicts"), [(4, False), (5, True)])
def test_bulk_is_not_evicted_for_a_request_that_could_not_start(slots: int, evicts: bool) -> None:
    """Trap 2: without a slot for it, eviction would save it no time."""

    async def story(world: World) -> None:
        bulk = await _bulk(world)
        residents = [asyncio.create_task(world.ask(f"rt{i}", max_tokens=200)) for i in range(4)]
        await world.clock.sleep(0.3)
        await _until_a_step_begins(world)
        begun_s, found = world.core.plans[-1]
        assert {"rt0", "rt1", "rt2", "rt3"} < set(ran(found)), "bulk rides with four that decode"
        late = asyncio.create_task(world.ask("late", max_tokens=2))
        await world.clock.sleep(0.1)
        [result] = [r for r in world.core.results if r.step_id == found.step_id]
        assert set(result.evicted) == (set(ran(found)) - {"rt0", "rt1", "rt2", "rt3"} if evicts else set())
        assert ("late" in ran(_next_plan(world, begun_s))) == evicts
        await asyncio.gather(*bulk, *residents, late)

    tiers = make_tiers(realtime={"batch_size": fixed(slots)})
    run_world(story, known=FAST, info=make_info(step_eviction=StepEviction.ROWS), tiers=tiers)


@played_by(run_world, known=FAST, info=make_info(step_eviction=StepEviction.ROWS))
async def test_reactions_are_reported_in_steps(world: World) -> None:
    bulk = await _bulk(world)
    await world.ask("rt", max_tokens=1)
    count = world.prometheus.get_sample_value("tidegate_reaction_steps_count", {"tier": "realtime"})
    assert count == 1
    at_most_one = world.prometheus.get_sample_value("tidegate_reaction_steps_bucket", {"tier": "realtime", "le": "1.0"})
    assert at_most_one == 1
    await asyncio.gather(*bulk)
