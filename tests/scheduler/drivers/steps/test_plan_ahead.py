"""Async scheduling: plans that are made before the result of the step in flight is known."""

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.interface import EngineInfo, PreemptionMode, StepPlan, StepResult
from engine.modeled.engine import modeled_token
from engine.step_time.cost import StepCost
from scheduler.request import Request
from tests.scheduler.builders import make_core, make_info, make_request, make_tiers
from tests.scheduler.stepped_core import SteppedCore
from tests.scheduler.world import World, run_world

AHEAD = make_info(steps_ahead=1)
COST = StepCost(step_s=0.005, prefill_token_s=20e-6, decode_s=50e-6)  # about a GPU's with 8 B parameters


def stepped(info: EngineInfo = AHEAD, *, prefix_cache: bool = False, **tiers: Any) -> SteppedCore:
    return SteppedCore(make_core(make_tiers(**tiers), info), prefix_cache=prefix_cache)


def ahead(stepped: SteppedCore) -> StepPlan | None:
    return stepped.core.planner.plan_ahead(stepped.now)


def names(plan: StepPlan | None) -> dict[str, int]:
    assert plan is not None
    assert plan.ahead
    return {run.seq_id: run.num_tokens for run in plan.run}


def test_a_plan_ahead_holds_decodes_and_chunks_and_whoever_arrived() -> None:
    stepped_core = stepped(make_info(steps_ahead=1, max_step_tokens=48))
    stepped_core.accept(make_request("decode", prompt=8), make_request("long", prompt=100))
    first = stepped_core.submit()
    assert {run.seq_id: run.num_tokens for run in first.run} == {"decode": 8, "long": 40}
    stepped_core.accept(make_request("new", prompt=5))
    plan = ahead(stepped_core)
    assert names(plan) == {"decode": 1, "long": 42, "new": 5}
    stepped_core.engine.submit(plan)  # type: ignore[arg-type]
    stepped_core.collect()
    assert names(ahead(stepped_core)) == {"decode": 1, "long": 18, "new": 1}


def test_a_plan_ahead_changes_no_token_of_a_state() -> None:
    stepped_core = stepped()
    stepped_core.accept(make_request("a", prompt=8), make_request("b", "bulk", prompt=100))
    stepped_core.submit()
    ahead(stepped_core)
    states = stepped_core.core.held.table.states
    assert [(s.num_computed_tokens, s.output_token_ids) for s in states.values()] == [(0, []), (0, [])]


def test_a_sequence_that_is_certain_to_end_is_left_out() -> None:
    stepped_core = stepped()
    stepped_core.accept(make_request("ends", max_tokens=2), make_request("goes on", max_tokens=9))
    stepped_core.step()
    stepped_core.submit()
    assert names(ahead(stepped_core)) == {"goes on": 1}


def test_there_is_no_plan_ahead_if_nothing_is_left() -> None:
    stepped_core = stepped()
    stepped_core.accept(make_request("ends", max_tokens=1))
    stepped_core.submit()
    assert ahead(stepped_core) is None


def test_a_sequence_is_aborted_only_when_its_step_has_ended() -> None:
    stepped_core = stepped()
    stepped_core.accept(make_request("a"), make_request("b"))
    stepped_core.submit()
    stepped_core.core.held.cancel(["a"])
    assert ahead(stepped_core) is None
    stepped_core.collect()
    assert stepped_core.submit().abort == ("a",)


def test_a_sequence_loses_its_blocks_only_when_its_step_has_ended() -> None:
    """A chat needs blocks that a bulk sequence holds, which is in the step in flight."""
    stepped_core = stepped(make_info(steps_ahead=1, num_blocks=8))
    stepped_core.accept(make_request("bulk", "bulk", prompt=100, max_tokens=20))
    stepped_core.submit()
    stepped_core.accept(make_request("chat", prompt=60, max_tokens=20))
    assert ahead(stepped_core) is None
    stepped_core.collect()
    assert [p.mode for p in stepped_core.submit().preempt] == [PreemptionMode.RECOMPUTE]


def test_blocks_of_the_step_in_flight_are_not_given_away() -> None:
    """Blocks of 16: the step in flight fills 6 of 8, so that a prompt of 40 tokens has no room."""
    stepped_core = stepped(make_info(steps_ahead=1, num_blocks=8))
    stepped_core.accept(make_request("a", prompt=90, max_tokens=4))
    stepped_core.submit()
    stepped_core.accept(make_request("b", prompt=40, max_tokens=4))
    assert names(ahead(stepped_core)) == {"a": 1}


def test_tokens_that_the_prefix_cache_had_are_not_run_again() -> None:
    """The plan ahead does not know them yet: it asks for more tokens than are left."""
    stepped_core = stepped(make_info(steps_ahead=1, max_step_tokens=32), prefix_cache=True)
    text = list(range(3, 83))
    stepped_core.accept(make_request("first", prompt=text, max_tokens=1))
    stepped_core.run()
    stepped_core.accept(make_request("again", prompt=text, max_tokens=4))
    stepped_core.submit()
    plan = ahead(stepped_core)
    assert names(plan) == {"again": 32}
    stepped_core.engine.submit(plan)  # type: ignore[arg-type]
    stepped_core.collect()
    report = stepped_core.collect()
    assert report.work is not None
    assert report.work.decodes == 1, "the cached tokens are no work of the step that was planned before they were known"
    state = stepped_core.core.held.table.states["again"]
    assert (state.num_computed_tokens, len(state.output_token_ids)) == (81, 2)


def test_what_bulk_may_add_counts_the_step_in_flight_as_ended() -> None:
    """That step holds as much bulk as the chat allows, so that the next one may hold little."""
    stepped_core = stepped(make_info(steps_ahead=1, num_blocks=4000), realtime={"max_slowdown": 1.25})
    stepped_core.accept(make_request("chat", prompt=64, max_tokens=400))
    for _ in range(100):
        stepped_core.step()
    stepped_core.accept(*(make_request(f"b{i}", "bulk", prompt=16, max_tokens=99) for i in range(60)))
    running = stepped_core.core.running
    chat = stepped_core.core.held.table.states["chat"]
    before_s = running.left_s([chat], is_ahead=False)
    stepped_core.submit()
    after_s = running.left_s([chat], is_ahead=True)
    assert after_s < before_s
    stepped_core.collect()
    assert running.left_s([chat], is_ahead=False) == pytest.approx(after_s, abs=1e-3)


def test_a_step_is_expected_to_take_its_usual_time_and_planned_to_take_rather_more() -> None:
    """The next plan is made shortly before the expected end: by the other time, it would mostly come too late."""
    core = make_core(make_tiers(), AHEAD, None)
    stepped_core = SteppedCore(core, COST, noise=0.2)
    stepped_core.accept(make_request("a", max_tokens=400))
    for _ in range(300):
        stepped_core.step()
    stepped_core.submit()
    assert core.running.expected_s == pytest.approx(COST.step(COST.decode(330)), rel=0.15)
    assert core.running.step_s > 1.2 * core.running.expected_s


def test_a_request_that_is_refused_is_told_while_steps_follow_each_other() -> None:
    async def story(world: World) -> None:
        bulk = asyncio.create_task(world.ask("bulk", "bulk", 20, 300))
        await world.clock.sleep(0.1)
        refused = await world.ask("too long", "realtime", AHEAD.max_model_len + 1)
        assert refused.events[-1].error
        assert not bulk.done()
        await bulk

    run_world(story, info=AHEAD, cost=COST, known=COST)


@dataclass
class Steps:
    """What the engine of a world was asked for."""

    plans: list[StepPlan] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    @property
    def share_ahead(self) -> float:
        return sum(plan.ahead for plan in self.plans) / len(self.plans)


def note_steps(world: World) -> Steps:
    steps, submit = Steps(), world.engine.submit

    def noting(plan: StepPlan) -> None:
        steps.plans.append(plan)
        submit(plan)

    world.engine.submit = noting
    return steps


def expected_tokens(request: Request) -> list[int]:
    sampling = request.sampling
    return [modeled_token(sampling.seed, i, AHEAD.vocab_size) for i in range(sampling.max_tokens)]


@pytest.mark.parametrize("num_bulk", (40, 400))
def test_nearly_every_step_is_planned_ahead(num_bulk: int) -> None:
    """Chats beside saturated bulk, of which some waits, some begins and some ends in most steps."""

    async def story(world: World) -> Steps:
        steps = note_steps(world)
        bulk = [world.ask(f"b{i}", "bulk", 20 + i % 50, 10 + i % 60) for i in range(num_bulk)]

        async def chats() -> None:
            for i in range(12):
                await world.ask(f"c{i}", "realtime", 30 + 7 * i, 12)

        await asyncio.gather(chats(), *bulk)
        return steps

    info = make_info(steps_ahead=1, num_blocks=4000)
    steps = run_world(story, info=info, cost=COST, known=COST, noise=0.05)
    assert len(steps.plans) > 50
    assert steps.share_ahead >= 0.9


LAUNCH_S = 0.0025  # what the engine needs from a plan to its launch, of a step of 5 ms


@pytest.mark.parametrize("launch_s", [0.0, LAUNCH_S])
def test_plans_are_made_as_early_as_the_engine_needs_them(launch_s: float) -> None:
    """An engine that launches late says so. Then plans come earlier, until the device hardly waits."""

    async def story(world: World) -> list[float]:
        engine, leads, submit, collect = world.engine, list[float](), world.engine.submit, world.engine.collect
        late_s = deque[float]()

        def noting(plan: StepPlan) -> None:
            ends_s = engine._running.ends_s if engine._running is not None else world.clock.now()
            lead_s = ends_s - world.clock.now() if plan.ahead else launch_s
            leads.append(lead_s)
            late_s.append(max(0.0, launch_s - lead_s))
            submit(plan)

        async def reporting() -> StepResult:
            return replace(await collect(), late_s=late_s.popleft())

        engine.submit, engine.collect = noting, reporting
        await world.ask("chat", "realtime", 20, 1500)
        return leads[500:]

    info = make_info(steps_ahead=1, max_model_len=2000)
    leads = run_world(story, info=info, cost=COST, known=COST, noise=0.05)
    late_s = sum(max(0.0, launch_s - lead_s) for lead_s in leads) / len(leads)
    assert late_s < 0.02 * COST.step_s
    assert launch_s <= sorted(leads)[len(leads) // 2] < launch_s + 0.0015


def test_answers_of_steps_planned_ahead_are_right() -> None:
    async def story(world: World) -> Steps:
        steps = note_steps(world)
        tiers = ("realtime", "bulk", "batch")
        asked = [world.ask(f"r{i}", tiers[i % 3], 5 + 13 * i % 90, 1 + 7 * i % 30) for i in range(60)]
        await asyncio.gather(*asked)
        for answer in world.answers.values():
            assert answer.token_ids == expected_tokens(answer.request)
        return steps

    few_blocks = make_info(steps_ahead=1, num_blocks=60, max_step_tokens=128)
    for info in (AHEAD, few_blocks):
        steps = run_world(story, info=info, cost=COST, known=COST, prefix_cache=True)
        assert steps.share_ahead > 0.3
