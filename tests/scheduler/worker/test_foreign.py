"""A worker whose model has another vocabulary than the gateway's claims nothing, and says why."""

import asyncio

from engine.modeled.engine import ModeledEngine
from scheduler.drivers.steps.driver import StepDriver
from scheduler.worker.claimer import FOREIGN, FOREIGN_S
from tests.scheduler.builders import expected_tokens, make_core, make_info
from tests.scheduler.world import World, played_by, run_world

INFO = make_info()


async def replace_worker(world: World, vocabulary: str) -> None:
    """Let the world's own worker have this vocabulary."""
    await world.kill_worker()
    engine = ModeledEngine(INFO, world.clock.sleep)
    world.begin_worker(StepDriver(make_core(world.tiers, INFO), engine), engine, vocabulary=vocabulary)


@played_by(run_world, info=INFO)
async def test_requests_of_another_vocabulary_go_to_other_workers(world: World) -> None:
    await replace_worker(world, "b")
    asked = asyncio.create_task(world.ask("r", vocabulary="a"))
    await world.clock.sleep(1.0)
    assert world.loop.why_idle() == FOREIGN and not world.core.held.counts["accepted"]
    right = world.add_worker(
        StepDriver(make_core(world.tiers, INFO), engine := ModeledEngine(INFO, world.clock.sleep)),
        engine,
        "right",
        vocabulary="a",
    )
    answer = await asked
    assert world.clock.now() < FOREIGN_S, "it went back at once"
    assert answer.token_ids == expected_tokens(answer.request)
    assert right.core.held.counts["finished"] == 1 and not world.core.held.counts["accepted"]


@played_by(run_world, info=INFO)
async def test_the_worker_tries_again_later(world: World) -> None:
    await replace_worker(world, "b")
    asked = asyncio.create_task(world.ask("r", vocabulary="a", deadline_ms=world.clock.wall_ms() + 60_000))
    await world.clock.sleep(1.0)
    asked.cancel()
    await world.clock.sleep(FOREIGN_S)
    assert world.loop.why_idle() == ""
    await world.ask("own", vocabulary="b")
    assert world.core.held.counts["finished"] == 1


@played_by(run_world, info=INFO)
async def test_what_is_unknown_is_served(world: World) -> None:
    await replace_worker(world, "b")
    await world.ask("r")
    assert world.core.held.counts["finished"] == 1 and world.loop.why_idle() == ""
