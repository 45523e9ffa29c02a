"""Workers that die in virtual time: at moments that a test chooses, or in a step that a deadly request is in."""

import asyncio
from collections.abc import Callable

from engine.interface import StepPlan
from engine.modeled.engine import ModeledEngine
from engine.modeled.timer import LoopTimer
from engine.sequences.sequence import Sequence
from scheduler.drivers.steps.driver import StepDriver
from scheduler.request_state import RequestState
from tests.scheduler.builders import FAST, CheckedCore, make_core
from tests.scheduler.world import World

RESTART_S = 0.5  # seconds from a death to the next worker

Deadly = Callable[[Sequence], bool]


class Killed(BaseException):
    """The end of a worker that has no time to say anything. Nothing in a worker catches it."""


class DeadlyEngine(ModeledEngine):
    """An engine whose worker dies in each step that runs a sequence for which `is_deadly` holds."""

    is_deadly: Deadly

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        if any(self.is_deadly(self._table[run.seq_id]) for run in plan.run):
            raise Killed


class Succession:
    """The workers of a world, one after the other. Each begins when the one before it has died."""

    def __init__(self, world: World, is_deadly: Deadly = lambda sequence: False) -> None:
        self._world = world
        self._is_deadly = is_deadly
        self._dead: list[CheckedCore] = []
        self.deaths = 0

    @property
    def lives(self) -> list[RequestState]:
        """The states of all claimed requests, in all workers."""
        return [life for core in (*self._dead, self._world.core) for life in core.lives]

    @property
    def plans(self) -> list[StepPlan]:
        """The plans of all workers."""
        return [plan for core in (*self._dead, self._world.core) for _, plan in core.plans]

    async def run(self) -> None:
        """Replace each worker that dies in a deadly step, until this task is cancelled."""
        while True:
            running = self._world.running
            await asyncio.wait([running])
            if not running.cancelled() and isinstance(running.exception(), Killed):
                self.deaths += 1
                await self.succeed()
            else:
                await self._world.clock.sleep(RESTART_S)  # a test has ended this worker, and begins the next one

    async def kill(self) -> None:
        """Kill the worker that runs now, and begin the next one."""
        await self._world.kill_worker()
        await self.succeed()

    async def succeed(self) -> None:
        """Begin the next worker."""
        world = self._world
        self._dead.append(world.core)
        engine = DeadlyEngine(world.engine.info, world.clock.sleep, FAST, 0.0, timer=LoopTimer())
        engine.is_deadly = self._is_deadly
        world.begin_worker(StepDriver(make_core(world.tiers, engine.info), engine), engine)
        await world.settle()
