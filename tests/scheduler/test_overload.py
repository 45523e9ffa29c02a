"""Admission, worker and heartbeats together, in virtual time, under more load than the engine carries."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from scheduler.client.rejection import Rejected, RejectReason
from tests.scheduler.builders import FAST, make_tiers
from tests.scheduler.world import World, run_world

LASTS_S = 14.0
LEARNING_S = 7.0  # at first it is not known how long requests stay
TTFT_SLO_S = 0.5


@dataclass
class Outcome:
    arrived_s: float
    ttft_s: float | None = None  # None: refused


async def offer(world: World, rate_per_s: float, prompt: int, max_tokens: int) -> list[Outcome]:
    """Poisson arrivals for `LASTS_S`."""
    rng, outcomes, asking, n = random.Random(5), list[Outcome](), set[asyncio.Task[None]](), 0
    while world.clock.now() < LASTS_S:
        outcomes.append(Outcome(world.clock.now()))
        asking.add(asyncio.create_task(ask(world, f"r{n}", prompt, max_tokens, outcomes[-1])))
        n += 1
        await world.clock.sleep(rng.expovariate(rate_per_s))
    await asyncio.gather(*asking)
    return outcomes


async def ask(world: World, request_id: str, prompt: int, max_tokens: int, outcome: Outcome) -> None:
    generation = await world.client.submit([world.request(request_id, prompt=prompt, max_tokens=max_tokens)])
    if isinstance(generation, Rejected):
        assert generation.reason in (RejectReason.OVERLOADED, RejectReason.QUEUE_FULL)
        return
    async with generation as events:
        async for event in events:
            if event.token_ids and outcome.ttft_s is None:
                outcome.ttft_s = world.clock.now() - outcome.arrived_s


def overload(predict: bool, rate_per_s: float, prompt: int, max_tokens: int) -> tuple[float, float]:
    """Return the share that was admitted, and the share of those that was too late; after `LEARNING_S`."""
    admission = {"predict": True} if predict else {"patience_ms": None}
    tiers = make_tiers(realtime={"admission": admission, "batch_size": {"min": 16, "start": 16, "max": 16}})

    async def story(world: World) -> list[Outcome]:
        return await offer(world, rate_per_s, prompt, max_tokens)

    outcomes = [o for o in run_world(story, tiers=tiers, cost=FAST, known=FAST, noise=0.05) if o.arrived_s > LEARNING_S]
    served = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    assert served, "an overloaded tier still serves"
    return len(served) / len(outcomes), sum(s > TTFT_SLO_S for s in served) / len(served)


@pytest.mark.parametrize(
    ("rate_per_s", "prompt", "max_tokens"),
    [(40.0, 400, 2), (40.0, 20, 60)],
    ids=["prompts are the bottleneck", "slots are the bottleneck"],
)
def test_requests_admitted_under_overload_are_served_in_time(rate_per_s: float, prompt: int, max_tokens: int) -> None:
    share, late = overload(True, rate_per_s, prompt, max_tokens)
    share_without, late_without = overload(False, rate_per_s, prompt, max_tokens)
    assert share_without < 0.5 and late_without > 0.5, "the load was one that needs admission"
    assert late < 0.05
    assert 0.85 * share_without < share < 1.15 * share_without, "the engine is full, and not fuller than that"


def test_no_request_is_refused_without_overload() -> None:
    share, late = overload(True, 4.0, 100, 8)
    assert (share, late) == (1.0, 0.0)
