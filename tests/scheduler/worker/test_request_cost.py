"""How much a worker computes for a step and a request, as calls of Python functions: unlike times, these do not vary.

The bounds are 15 % above what was counted with Python 3.11; later versions make fewer calls. A change that exceeds one
makes every step, or every request, dearer: look for work that can go before a bound rises.
"""

import asyncio
import selectors
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import engine.modeled.engine
import scheduler.events.memory
import scheduler.queue.memory
import scheduler.virtual_time
from engine.modeled.engine import ModeledEngine
from engine.modeled.timer import LoopTimer
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import StepCore
from scheduler.drivers.steps.driver import StepDriver
from tests.scheduler.builders import FAST, make_info, make_tiers
from tests.scheduler.world import World, play_in_world

ROUNDS = 40  # the least of them counts: what the worker does every second falls into some
NUM_TOKENS = 4  # of an answer, each in a step of its own
FEW, MANY = 2, 10  # requests at once
ELSEWHERE = (
    __file__,
    scheduler.virtual_time.__file__,
    str(Path(asyncio.__file__).parent),  # uvloop does in C what these do
    selectors.__file__,
    # In production, others are in the place of these.
    str(Path(engine.modeled.engine.__file__).parent),
    str(Path(scheduler.queue.memory.__file__).parent),
    scheduler.events.memory.__file__,
)


class Calls:
    """The calls of Python functions by the scheduler of a worker."""

    def __init__(self) -> None:
        self.num = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not frame.f_code.co_filename.startswith(ELSEWHERE):
            self.num += 1


async def calls_of_a_wave(world: World, count: int) -> int:
    """Return the calls for `count` requests that come at once, by the same key."""
    found = []
    for number in range(ROUNDS):
        requests = [
            world.request(f"r{count}-{number}-{i}", max_tokens=NUM_TOKENS, reply_to="reader", is_whole=True)
            for i in range(count)
        ]
        calls = Calls()
        sys.setprofile(calls.note)
        try:
            await world.worker_queue.put(requests)
            await world.clock.sleep(0.2)
        finally:
            sys.setprofile(None)
        assert not len(world.core.held)
        found.append(calls.num)
    return min(found)


def test_a_step_and_a_request_make_few_calls() -> None:
    def begin(world: World) -> None:
        info = make_info(verifies_drafts=True)
        core = StepCore(world.tiers, info, SLAController(world.tiers, info.num_layers))
        modeled = ModeledEngine(info, world.clock.sleep, FAST, timer=LoopTimer())
        world.begin_worker(StepDriver(core, modeled), modeled)

    async def story(world: World) -> tuple[int, int]:
        await world.events.open("reader")
        return await calls_of_a_wave(world, FEW), await calls_of_a_wave(world, MANY)

    few, many = play_in_world(story, make_tiers(), begin)
    of_request = (many - few) / (MANY - FEW)
    of_step = (few - FEW * of_request) / NUM_TOKENS
    assert of_step <= 846
    assert of_request <= 895
