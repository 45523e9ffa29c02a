"""Tiers change while a worker serves: no request is lost, and a tier with held requests cannot be removed."""

import asyncio
from typing import Any

from scheduler.config import TierSet, parse_tiers
from scheduler.request import Claimed
from tests.scheduler.builders import make_tiers
from tests.scheduler.world import World, run_world
from tidegate.worker.engine_worker import WorkerTiers


def without(*names: str, **more: dict[str, Any]) -> TierSet:
    """Return the builders' tiers without `names` and with others."""
    document = make_tiers().document(defaults=False)
    kept = {name: tier for name, tier in document["tiers"].items() if name not in names}
    return parse_tiers({**document, "batch_tier": "realtime", "tiers": {**kept, **more}})


class Administered:
    """Changes the tiers of a world's client and worker at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.consumer = WorkerTiers(world.core.held, world.metrics)

    def change(self, tiers: TierSet) -> None:
        assert self.consumer.objection(tiers) == ""
        self.consumer.reconfigure(tiers)
        self._world.client.reconfigure(tiers)
        self._world.tiers = tiers


def test_requests_that_run_and_wait_outlive_a_change_of_everything() -> None:
    async def story(world: World) -> None:
        one = {"min": 1, "start": 1, "max": 1}
        admin = Administered(world)
        admin.change(make_tiers(bulk={"batch_size": one}))
        answers = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=40)) for i in range(5)]
        await world.clock.sleep(0.3)
        changed = make_tiers(bulk={"batch_size": one, "priority": 500, "slo": {"itl_p99_ms": 5000}, "floor": 0.0})
        admin.change(changed)
        world.core.check()
        assert len(world.core.held) > 0
        assert all(state.tier is changed["bulk"] for state in world.core.held.table)
        await world.clock.sleep(0.3)
        admin.change(make_tiers(bulk={"batch_size": {"min": 1, "start": 64, "max": 64}}))
        for answer in answers:
            assert len((await answer).token_ids) == 40

    run_world(story)


def test_a_tier_can_be_removed_only_after_its_last_request_has_ended() -> None:
    async def story(world: World) -> None:
        admin = Administered(world)
        answer = asyncio.create_task(world.ask("b", "bulk", max_tokens=40))
        await world.clock.sleep(0.1)
        assert "'bulk' cannot be removed: requests of it are under way here (1)" in admin.consumer.objection(
            without("bulk")
        )
        assert admin.consumer.objection(without("batch")) == ""
        await answer
        admin.change(without("bulk", eco={"priority": 5}))
        eco = await world.ask("e", "eco", max_tokens=4)
        assert len(eco.token_ids) == 4
        await world.clock.sleep(3.0)  # several rounds of maintenance
        assert not world.running.done()
        assert {tier for worker in await world.registry.workers() for tier in worker.tiers} == {
            "realtime",
            "batch",
            "eco",
        }

    run_world(story)


def test_a_request_claimed_while_its_tier_was_removed_gets_the_lowest_tier() -> None:
    async def story(world: World) -> None:
        admin = Administered(world)
        stray = world.request("stray", "bulk", max_tokens=4)
        admin.change(without("bulk"))
        world.core.held.accept([Claimed(stray, fence=1)], world.clock.now(), world.clock.wall_ms())
        assert world.core.held.table.states["stray"].tier.name == "batch"
        world.core.held.release_all()

    run_world(story)
