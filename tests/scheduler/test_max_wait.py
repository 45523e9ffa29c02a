"""Max-wait on an engine that takes fixed batches: a call costs the same however full it is."""

import asyncio

import pytest

from engine.step_time.cost import StepCost
from tests.scheduler.builders import fixed, make_info, make_tiers
from tests.scheduler.world import World, run_world

CALL = StepCost(step_s=0.1, prefill_token_s=0.0, attend_s=0.0, context_token_s=0.0, decode_s=0.0)
SIZE = 16


async def _traffic(world: World, gap_s: float, count: int) -> list[float]:
    """Send `count` requests, one every `gap_s`; return their TTFTs."""
    tasks = []
    for i in range(count):
        tasks.append(asyncio.create_task(world.ask(f"r{i}", prompt=8, max_tokens=1)))
        await world.clock.sleep(gap_s)
    return [answer.ttft_s for answer in await asyncio.gather(*tasks)]


def _calls(gap_s: float, count: int, max_wait_ms: float) -> tuple[int, float]:
    """Return how many calls the engine made, and the longest time to an answer."""

    async def story(world: World) -> tuple[int, float]:
        slowest = max(await _traffic(world, gap_s, count))
        return len(world.core.plans), slowest

    wait = {"min": 0, "start": max_wait_ms, "max": max_wait_ms}
    tiers = make_tiers(realtime={"batch_size": fixed(SIZE), "max_wait_ms": wait, "queue_limit": 5000})
    return run_world(story, tiers=tiers, info=make_info(), cost=CALL, known=CALL)


def test_a_flood_fills_the_calls_and_meets_its_slo() -> None:
    """At 100 requests a second, a call every 100 ms takes ten of them, and one that waits a little takes sixteen."""
    (eager, _), (patient, slowest_s) = _calls(0.01, 1000, 0), _calls(0.01, 1000, 200)
    assert patient < 0.85 * eager
    assert slowest_s < 0.5


@pytest.mark.parametrize("max_wait_ms", [0, 200])
def test_thin_traffic_is_answered_at_once(max_wait_ms: float) -> None:
    _, slowest_s = _calls(0.5, 30, max_wait_ms)
    assert slowest_s < 0.115, "a call, and no wait"
