"""What a worker announces about itself."""

import asyncio
import json

from tests.scheduler.builders import make_tiers
from tests.scheduler.world import World, played_by, run_world

STATES = {"waiting", "running", "paused", "swapped"}
BEGINS_TO_GROW = ("bulk", "batch_size", 2, 4, "queue")


@played_by(run_world, tiers=make_tiers(bulk={"batch_size": {"min": 1, "start": 2, "max": 6}}), noise=0.05)
async def test_a_worker_says_what_its_controller_does_and_as_of_when(world: World) -> None:
    bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=100)) for i in range(6)]
    await world.clock.sleep(2.0)
    [explained] = [json.loads(text) for text in (await world.registry.sla()).values()]
    assert world.clock.wall_ms() - 1500 <= explained["at_ms"] <= world.clock.wall_ms()
    assert set(explained["tiers"]) == set(make_tiers().tiers)
    bulk_report = explained["tiers"]["bulk"]
    assert 0 < sum(bulk_report["requests"].values()) <= 6 and set(bulk_report["requests"]) == STATES
    assert 0 < bulk_report["engine_s"] <= 2.0 and explained["tiers"]["realtime"]["engine_s"] == 0
    assert 0 < explained["kv_usage"] <= 6 * 9 / 400, "six have up to 132 tokens"
    assert 0 < explained["step_time_error"] < 0.5
    first = explained["decisions"][0]
    assert (first["tier"], first["knob"], first["old"], first["new"], first["signal"]) == BEGINS_TO_GROW
    assert 0 < first["ago_s"] < 2.0
    await asyncio.gather(*bulk)
