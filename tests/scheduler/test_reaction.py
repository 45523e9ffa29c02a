"""A real-time arrival suspends a running step of bulk, which then goes on where it was."""

import asyncio
from collections.abc import Iterable

import pytest

from engine.interface import StepEnd, StepPlan, StepResult
from scheduler.drivers.steps.isolation import Isolation
from tests.scheduler.builders import FAST, expected_tokens, fixed, make_info, make_tiers, ran
from tests.scheduler.world import Answer, World, played_by, run_world

SUSPENDS = make_info(suspends_steps=True)
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


async def _chat_beside_a_step(world: World) -> tuple[asyncio.Task[Answer], StepPlan]:
    """Ask for a chat while a step of bulk runs. Return the chat and the plan of that step."""
    await _until_a_step_begins(world)
    begun = world.core.plans[-1][1]
    return asyncio.create_task(world.ask("rt", max_tokens=60)), begun


def _results_of(world: World, plan: StepPlan) -> list[StepResult]:
    return [result for result in world.core.results if result.step_id == plan.step_id]


def test_an_arrival_suspends_the_running_step_which_goes_on_after_it() -> None:
    async def story(world: World) -> None:
        bulk = await _bulk(world)
        await _until_a_step_begins(world)
        step_s = world.core.results[-1].elapsed_s
        begun = world.core.plans[-1][1]
        await world.ask("rt", max_tokens=1)
        suspended, beside, *later = (r for r in world.core.results if r.step_id >= begun.step_id)
        assert (suspended.step_id, suspended.end) == (begun.step_id, StepEnd.SUSPENDED)
        assert suspended.elapsed_s < 0.5 * step_s and not suspended.outputs
        assert [o.seq_id for o in beside.outputs] == ["rt"], "no other bulk runs while a step waits"
        await world.clock.sleep(2 * step_s)
        parts = _results_of(world, begun)
        assert parts[-1].end is StepEnd.DONE and [o.seq_id for o in parts[-1].outputs] == list(ran(begun))
        assert sum(r.elapsed_s for r in parts) == pytest.approx(step_s, rel=0.1), "nothing is computed twice"
        await asyncio.gather(*bulk)

    run_world(story, known=FAST, info=SUSPENDS)


def test_a_suspended_step_goes_on_in_parts_beside_a_chat() -> None:
    """Each part is at most what the chat's account of delays has left, and at least a step's fixed cost."""

    async def story(world: World) -> None:
        bulk = await _bulk(world)
        chat, begun = await _chat_beside_a_step(world)
        await world.clock.sleep(0.5)
        parts = _results_of(world, begun)
        assert len(parts) >= 3 and parts[-1].end is StepEnd.DONE
        layer_s = sum(r.elapsed_s for r in parts) / 30
        assert all(FAST.step_s - 1e-9 <= r.elapsed_s <= 3 * FAST.step_s + layer_s for r in parts[1:-1])
        assert (await chat).token_ids == expected_tokens(chat.result().request)
        await asyncio.gather(*bulk)

    run_world(story, known=FAST, info=SUSPENDS, tiers=make_tiers(realtime={"max_slowdown": 1.5}))


def test_a_suspended_step_whose_sequence_is_cancelled_is_dropped() -> None:
    async def story(world: World) -> None:
        bulk = await _bulk(world)
        chat, begun = await _chat_beside_a_step(world)
        await world.clock.sleep(0.03)
        assert any(r.end is StepEnd.SUSPENDED for r in world.core.results)
        world.core.held.cancel([next(iter(ran(begun)))])
        await world.clock.sleep(0.1)
        dropped = [r for r in world.core.results if r.end is StepEnd.DROPPED]
        assert [r.step_id for r in dropped] == [begun.step_id]
        await chat
        bulk[0].cancel()
        await asyncio.gather(*bulk[1:])

    run_world(story, known=FAST, info=SUSPENDS, tiers=make_tiers(realtime={"max_slowdown": 1.01}))


def test_a_suspended_step_goes_on_to_its_end_before_a_suspect_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the worker dies, only what is in one step with a suspect, and that suspect, may be blamed."""

    async def story(world: World) -> None:
        bulk = await _bulk(world)
        await _until_a_step_begins(world)
        monkeypatch.setattr(Isolation, "has_suspects", True)
        await world.ask("first", max_tokens=1)
        assert not any(r.end is StepEnd.SUSPENDED for r in world.core.results), "nor is any step suspended beside it"
        monkeypatch.undo()
        await world.clock.sleep(0.5)
        chat, begun = await _chat_beside_a_step(world)
        await world.clock.sleep(0.03)
        num_parts = len(_results_of(world, begun))
        monkeypatch.setattr(Isolation, "has_suspects", True)
        await world.clock.sleep(0.05)
        later = _results_of(world, begun)[num_parts:]
        assert num_parts and [r.end for r in later] == [StepEnd.DONE]
        monkeypatch.undo()
        await asyncio.gather(chat, *bulk)

    run_world(story, known=FAST, info=SUSPENDS, tiers=make_tiers(realtime={"max_slowdown": 1.01}))


@played_by(run_world, known=FAST, info=SUSPENDS, tiers=make_tiers(realtime={"max_slowdown": 4}))
async def test_a_step_with_an_interactive_decode_waits_for_one_step_of_the_newcomer(world: World) -> None:
    bulk = await _bulk(world)
    first = asyncio.create_task(world.ask("rt0", max_tokens=60))
    await world.clock.sleep(0.4)
    await _until_a_step_begins(world)
    begun = world.core.plans[-1][1]
    assert len(begun.run) > 25 and "rt0" in ran(begun)
    await world.ask("rt1", max_tokens=2)
    ends = [(r.step_id, r.end) for r in world.core.results if r.step_id >= begun.step_id][:3]
    assert [end for _, end in ends] == [StepEnd.SUSPENDED, StepEnd.DONE, StepEnd.DONE]
    assert ends[2][0] == begun.step_id, "after the first step beside it"
    assert (await first).token_ids == expected_tokens(first.result().request)
    await asyncio.gather(*bulk)


@pytest.mark.trap(2)
@pytest.mark.parametrize(("slots", "suspends"), [(4, False), (5, True)])
def test_no_step_is_suspended_for_a_request_that_could_not_start(slots: int, suspends: bool) -> None:
    """Trap 2: without a slot for it, a suspension would save it no time."""

    async def story(world: World) -> None:
        residents = [asyncio.create_task(world.ask(f"rt{i}", max_tokens=200)) for i in range(4)]
        await world.clock.sleep(0.1)
        world.core.running.suspends_for = lambda *_: True  # type: ignore[method-assign]
        found: list[bool] = []
        decide = world.core.planner.suspends_for

        def decides(request_ids: Iterable[str], now: float) -> bool:
            found.append(decide(request_ids, now))
            return False

        world.core.planner.suspends_for = decides  # type: ignore[method-assign]
        late = asyncio.create_task(world.ask("late", max_tokens=2))
        await world.clock.sleep(0.1)
        assert found == [suspends]
        await asyncio.gather(*residents, late)

    tiers = make_tiers(realtime={"batch_size": fixed(slots)})
    run_world(story, known=FAST, info=SUSPENDS, tiers=tiers)


@played_by(run_world, known=FAST, info=SUSPENDS)
async def test_reactions_are_reported_in_steps(world: World) -> None:
    bulk = await _bulk(world)
    await world.ask("rt", max_tokens=1)
    count = world.prometheus.get_sample_value("tidegate_reaction_steps_count", {"tier": "realtime"})
    assert count == 1
    at_most_one = world.prometheus.get_sample_value("tidegate_reaction_steps_bucket", {"tier": "realtime", "le": "1.0"})
    assert at_most_one == 1
    await asyncio.gather(*bulk)
