"""Streams that go on with another worker whose engine answers differently: none fails, repeats a token or mixes."""

import asyncio
import inspect
import random
from collections.abc import Sequence
from typing import Any

from engine.modeled.engine import ModeledEngine, modeled_token
from engine.modeled.timer import LoopTimer
from scheduler.drivers.steps.driver import StepDriver
from scheduler.request import EventKind
from tests.scheduler.builders import FAST, VOCAB, fixed, make_core, make_info, make_tiers
from tests.scheduler.world import Answer, Worker, World, play_in_world

TIERS = make_tiers(realtime={"batch_size": fixed(256), "queue_limit": 1000}, bulk={"batch_size": fixed(256)})
INFO = make_info(num_blocks=40_000, max_model_len=4096)
STALL_S = 3.0  # longer than its peers wait for a silent worker
SALTS = (0, 1000, 2000)  # of the engines of the workers, in the order of their starts


class Stopped:
    """A part of the store as a process sees it that a signal may stop: while `goes_on` is not set, no call gets out."""

    def __init__(self, part: Any, goes_on: asyncio.Event) -> None:
        self._part, self._goes_on = part, goes_on

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if name == "for_worker":
            return lambda worker_id: Stopped(value(worker_id), self._goes_on)
        if not inspect.iscoroutinefunction(value):
            return value

        async def held_up(*args: Any) -> Any:
            await self._goes_on.wait()
            return await value(*args)

        return held_up


class Site:
    """The workers of a world. Each has an engine that answers differently."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._salts = iter(SALTS)
        self.goes_on = asyncio.Event()  # of the world's own worker
        self.goes_on.set()

    def driver(self) -> tuple[StepDriver, ModeledEngine]:
        salt, world = next(self._salts), self._world
        engine = ModeledEngine(INFO, world.clock.sleep, FAST, 0.0, timer=LoopTimer(), salt=salt)
        return StepDriver(make_core(world.tiers, INFO), engine), engine

    def begin_own(self) -> None:
        """Begin the world's own worker, which `stall` stops."""
        world = self._world
        seen = world.queue, world.events, world.registry
        world.queue, world.events, world.registry = (Stopped(part, self.goes_on) for part in seen)  # type: ignore[assignment]
        world.begin_worker(*self.driver())
        world.queue, world.events, world.registry = seen

    def begin_second(self) -> Worker:
        return self._world.add_worker(*self.driver(), "second")

    async def stall(self) -> None:
        self.goes_on.clear()
        await self._world.clock.sleep(STALL_S)
        self.goes_on.set()


def play(story: Any) -> Any:
    """Play `story(world, site)`: the world's own worker serves, and a second one comes after a while."""
    sites: list[Site] = []

    def begin(world: World) -> None:
        sites.append(Site(world))
        sites[0].begin_own()

    return play_in_world(lambda world: story(world, sites[0]), TIERS, begin)


async def ask_all(world: World, count: int, rng: random.Random, **more: Any) -> list[Answer]:
    async def ask(i: int) -> Answer:
        await world.clock.sleep(rng.uniform(0, 2))
        tier = rng.choice(["realtime", "realtime", "bulk"])
        return await world.ask(f"r{i}", tier, rng.randint(1, 60), rng.randint(20, 100), **more)

    return await asyncio.gather(*(ask(i) for i in range(count)))


def check(answer: Answer, salts: Sequence[int] = SALTS) -> int:
    """Check that an answer is whole, and that its tokens come from one engine after the other; return how many."""
    assert answer.events[-1].kind is EventKind.FINISHED, answer.events[-1]
    assert len(answer.token_ids) == answer.request.sampling.max_tokens
    assert [e.index for e in answer.events] == [
        sum(len(e.token_ids) for e in answer.events[:n]) for n in range(len(answer.events))
    ]
    sources = [
        {salt for salt in SALTS if token == modeled_token(answer.request.sampling.seed + salt, i, VOCAB)}
        for i, token in enumerate(answer.token_ids)
    ]
    assert all(sources)
    certain = [next(iter(found)) for found in sources if len(found) == 1]
    order = [salt for i, salt in enumerate(certain) if i == 0 or salt != certain[i - 1]]
    assert order == [salt for salt in salts if salt in order], "no engine comes back after another one"
    return len(order)


def test_no_stream_fails_repeats_or_mixes_when_its_worker_stalls_and_wakes() -> None:
    async def story(world: World, site: Site) -> list[Answer]:
        asked = asyncio.create_task(ask_all(world, 200, random.Random(7)))
        await world.clock.sleep(1.5)
        second = site.begin_second()
        await world.clock.sleep(0.5)
        await site.stall()
        answers = await asked
        second.loop.drain()
        await second.running
        return answers

    answers = play(story)
    assert sum(check(answer) > 1 for answer in answers) > 50, "many streams went on with the other worker"


def test_no_stream_fails_repeats_or_mixes_when_its_worker_dies() -> None:
    async def story(world: World, site: Site) -> list[Answer]:
        asked = asyncio.create_task(ask_all(world, 200, random.Random(8)))
        await world.clock.sleep(1.5)
        second = site.begin_second()
        await world.clock.sleep(0.5)
        await world.kill_worker()
        await world.clock.sleep(4.0)
        site.begin_own()
        answers = await asked
        second.loop.drain()
        await second.running
        return answers

    answers = play(story)
    assert sum(check(answer) > 1 for answer in answers) > 50
