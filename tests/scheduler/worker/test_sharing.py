"""Bulk that one worker has claimed and cannot begin goes to workers that have nothing to do."""

import asyncio

from engine.modeled.engine import ModeledEngine
from engine.step_time.cost import StepCost
from scheduler.control.windows import UPDATE_S
from scheduler.drivers.steps.driver import StepDriver
from tests.scheduler.builders import expected_tokens, make_core, make_info
from tests.scheduler.worker.test_loop import record
from tests.scheduler.world import Worker, World, played_by, run_world

ROOM = make_info(num_blocks=40)  # for ten of the requests below: a worker claims more than it can begin
COST = StepCost(step_s=0.01, prefill_token_s=1e-5, attend_s=0.0, context_token_s=0.0, decode_s=1e-4)
TOKENS = 60


def newcomer(world: World) -> Worker:
    core = make_core(world.tiers, ROOM, COST)
    engine = ModeledEngine(ROOM, world.clock.sleep, COST)
    return world.add_worker(StepDriver(core, engine), engine, "newcomer")


def ask(world: World, count: int) -> "list[asyncio.Task[object]]":
    return [asyncio.create_task(world.ask(f"b{n:02}", "bulk", max_tokens=TOKENS)) for n in range(count)]


@played_by(run_world, info=ROOM, cost=COST, known=COST)
async def test_a_worker_that_comes_later_gets_its_share_of_what_has_not_begun(world: World) -> None:
    asked = ask(world, 60)
    await world.clock.sleep(0.1)
    assert len(world.core.held) == 60 > 2 * world.core.held.table.num_resident("bulk") > 0
    second = newcomer(world)
    await world.clock.sleep(UPDATE_S)
    assert world.core.held.counts["released"] == 0, "at the first look, they may begin soon"
    await asyncio.gather(*asked)
    served = {"worker": world.core.held.counts["finished"], "newcomer": second.core.held.counts["finished"]}
    assert sum(served.values()) == 60 and served["newcomer"] >= 18
    for answer in world.answers.values():
        assert answer.token_ids == expected_tokens(answer.request)


@played_by(run_world, info=ROOM, cost=COST, known=COST)
async def test_what_has_begun_stays_where_it_is(world: World) -> None:
    looks: list[str] = []
    record(looks, world.worker_queue, "idle_workers", lambda *args: "look")
    asked = ask(world, 8)
    await world.clock.sleep(0.1)
    second = newcomer(world)
    await asyncio.gather(*asked)
    assert (world.core.held.counts["released"], second.core.held.counts["accepted"]) == (0, 0)
    assert looks == [], "the store is not asked"


@played_by(run_world, info=ROOM, cost=COST, known=COST)
async def test_nothing_is_given_back_while_no_worker_is_idle(world: World) -> None:
    second = newcomer(world)
    await world.clock.sleep(UPDATE_S)
    asked = ask(world, 128)
    await world.clock.sleep(0.1)
    assert min(w.held.table.num_waiting("bulk") for w in (world.core, second.core)) >= 20
    await world.clock.sleep(3 * UPDATE_S)
    assert len(second.core.held) and len(world.core.held)
    assert world.core.held.counts["released"] == second.core.held.counts["released"] == 0
    await asyncio.gather(*asked)


@played_by(run_world, info=ROOM, cost=COST, known=COST)
async def test_a_chat_goes_to_the_worker_without_one_though_both_have_bulk(world: World) -> None:
    cores = (world.core, newcomer(world).core)
    await world.clock.sleep(0.1)
    asked = ask(world, 2)
    for name, max_tokens in (("long", TOKENS), ("short", 2), ("late", TOKENS)):
        await world.clock.sleep(0.1)
        assert [len(core.held) - core.held.num_interactive for core in cores] == [1, 1]
        asked.append(asyncio.create_task(world.ask(name, max_tokens=max_tokens)))
    await world.clock.sleep(0.05)
    assert [core.held.num_interactive for core in cores] == [1, 1]
    await asyncio.gather(*asked)
