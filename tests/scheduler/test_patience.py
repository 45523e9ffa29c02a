"""The shipped patience under loads that no SLO survives: nobody gets an error, and predicted waits are about right."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import pytest

from engine.step_time.cost import StepCost
from scheduler.config import TierSet, load_tiers
from scheduler.request import Request
from tests.scheduler.builders import make_info, make_tiers
from tests.scheduler.world import World, run_world

SHIPPED = load_tiers(Path(__file__).parents[2] / "tiers.yaml")
PATIENT = make_tiers(realtime={"queue_limit": 10_000})  # no wait is too long
LASTS_S = 5.0
# About 1.8 k tokens of prompt a second on a CPU, and 50 k on a GPU.
CPU = StepCost(step_s=0.008, prefill_token_s=0.00054, attend_s=0.0, context_token_s=2e-6, decode_s=0.00077)
GPU = StepCost(step_s=0.008, prefill_token_s=0.00002, attend_s=0.0, context_token_s=2e-8, decode_s=0.00002)
PROMPT, OUTPUT = {CPU: 60, GPU: 700}, {CPU: 40, GPU: 150}  # mean tokens
ROOMY = make_info(max_model_len=8192, num_blocks=20_000, max_step_tokens=8192)

Load = Callable[["Users"], Awaitable[None]]


class Users:
    """Send requests of random lengths, and note how each first token was predicted and when it came."""

    def __init__(self, world: World, cost: StepCost, warm_s: float) -> None:
        self.world = world
        self._warm_s = world.clock.now() + warm_s
        self._cost = cost
        self._rng = random.Random(7)
        self._count = 0
        self.ratios: list[float] = []  # predicted ÷ measured, of requests with a prediction after `warm_s`

    async def ask(self) -> None:
        self._count += 1
        prompt = int(PROMPT[self._cost] * self._rng.lognormvariate(0, 0.6)) + 4
        output = int(OUTPUT[self._cost] * self._rng.lognormvariate(0, 0.5)) + 2
        request = self.world.request(f"r{self._count}", prompt=min(prompt, 4000), max_tokens=min(output, 1000))
        predicted_s, sent_s = await self._predicted_s(request), self.world.clock.now()
        is_counted = predicted_s is not None and sent_s >= self._warm_s
        async with await self.world.submit(request) as events:  # fails if the request is refused
            async for event in events:
                if event.token_ids and event.index == 0 and is_counted:
                    self.ratios.append(predicted_s / (self.world.clock.now() - sent_s))

    async def _predicted_s(self, request: Request) -> float | None:
        admission, tier = self.world.client._admission, self.world.tiers["realtime"]
        forecast = admission._forecast(tier, [request], self.world.clock.now(), 0)
        if forecast is None:
            return None
        return forecast.own_s + admission._wait_s(forecast, tier, await self.world.client.backlogs())


def streams(count: int, lasts_s: float = LASTS_S) -> Load:
    """Return a closed loop: each of `count` users asks again as soon as they have their answer."""

    async def load(users: Users) -> None:
        async def user() -> None:
            while users.world.clock.now() < lasts_s:
                await users.ask()

        await asyncio.gather(*(user() for _ in range(count)))

    return load


def burst(count: int, *, behind: int = 0) -> Load:
    """Return `count` requests at once. Before them, the server has answered `behind` others."""

    async def load(users: Users) -> None:
        for _ in range(behind):
            await users.ask()
        users.ratios.clear()
        await asyncio.gather(*(users.ask() for _ in range(count)))

    return load


def arrivals(rate_per_s: float) -> Load:
    """Return Poisson arrivals."""

    async def load(users: Users) -> None:
        rng, asking = random.Random(3), []
        while users.world.clock.now() < LASTS_S:
            asking.append(asyncio.create_task(users.ask()))
            await users.world.clock.sleep(rng.expovariate(rate_per_s))
        await asyncio.gather(*asking)

    return load


def ratios(load: Load, cost: StepCost, tiers: TierSet, warm_s: float = 0.0) -> list[float]:
    """Play `load` and return predicted ÷ measured first tokens. Fails if a request is refused.

    Requests before `warm_s` do not count.
    """

    async def story(world: World) -> list[float]:
        users = Users(world, cost, warm_s)
        await load(users)
        return users.ratios

    return run_world(story, tiers=tiers, info=ROOMY, cost=cost, noise=0.05)


@pytest.mark.parametrize(
    ("load", "cost"),
    [(streams(64), CPU), (burst(200), GPU)],
    ids=["64 streams, cpu", "200 at once, gpu"],
)
def test_a_benchmark_of_a_fresh_server_sees_no_error(load: Load, cost: StepCost) -> None:
    ratios(load, cost, SHIPPED)


@pytest.mark.parametrize(
    ("load", "warm_s", "share"),
    [
        (streams(32), 0.0, 0.9),
        pytest.param(streams(128, 10.0), 5.0, 0.9, marks=pytest.mark.full),
        (arrivals(36), 0.0, 0.7),
    ],
    ids=["32 streams", "128 streams", "1.2 x capacity"],
)
def test_most_predictions_are_right_within_a_factor_of_two(load: Load, warm_s: float, share: float) -> None:
    """Of the longest waits fewer are, since who is late does not always wait in order.

    After 128 prompts that come at once to a fresh server, it takes seconds until the capacity that it has seen holds
    decodes as well; until then predictions are up to ten times too long.
    """
    predicted = ratios(load, GPU, PATIENT, warm_s)
    assert sum(0.5 <= ratio <= 2 for ratio in predicted) >= share * len(predicted) > 0


@pytest.mark.parametrize("cost", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_waits_of_a_burst_are_predicted_without_bias(cost: StepCost) -> None:
    """Short prompts among those that come together go first, so the median is predicted too long."""
    assert 0.5 <= median(ratios(burst(200, behind=8), cost, PATIENT)) <= 2.5
