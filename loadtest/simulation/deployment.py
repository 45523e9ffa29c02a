"""A deployment in one process and in virtual time: N workers and the client of a gateway, on one queue.

It connects modeled engines to the shipped loop, core, controller, memory queue and client, as
`tidegate.worker.engine_worker` does with a real engine. So the simulator has no scheduler of its own. Knows the parts;
does not know the traffic (see `clients`).
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.interface import Engine, EngineInfo
from engine.modeled.engine import ModeledEngine
from engine.modeled.timer import LoopTimer
from loadtest.simulation.cost_card import CostCard
from loadtest.simulation.observation import EngineRecord, Observation
from loadtest.simulation.watched import WatchedEngine, WatchedMetrics
from scheduler.client.client import SchedulerClient
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import StepCore
from scheduler.drivers.steps.driver import StepDriver
from scheduler.drivers.steps.warmup import warm_up
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.registry.worker_status import WorkerStart
from scheduler.virtual_time import VirtualClock
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import WorkerLoop, build_loop

WARM_UP_S = 1.0  # seconds for the warm-up steps of a worker
MODEL_NAMES = ("model",)

BuildCore = Callable[[TierSet, EngineInfo, Callable[[], float], str], StepCore]


def build_core(
    tiers: TierSet, info: EngineInfo, draw: Callable[[], float] = lambda: 0.5, worker_id: str = ""
) -> StepCore:
    """Return the shipped scheduler core. Its step-time model has not observed any step of its engine yet."""
    controller = SLAController(tiers, info.num_layers, suspends_steps=info.suspends_steps)
    return StepCore(tiers, info, controller, draw=draw, worker_id=worker_id)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Workers come and go as the scale signal says."""

    most: int  # workers
    start_s: float  # until a new worker serves


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a run, except its traffic.

    With `scaling`, there may be more than `workers` of them, as many as the load needs. Closed loops fill the engines
    for `lead_s` before the load begins. `drift` maps the seconds since the load began to a factor on step times.
    """

    tiers: TierSet
    card: CostCard
    workers: int = 1
    scaling: Scaling | None = None
    seed: int = 0
    prefix_cache: bool = False
    lead_s: float = 0.0
    drift: Callable[[float], float] | None = None
    build_core: BuildCore = build_core


@dataclass(slots=True)
class Worker:
    core: StepCore
    loop: WorkerLoop
    record: EngineRecord
    running: "asyncio.Task[None]"
    is_leaving: bool = False

    def leave(self) -> None:
        """Claim nothing more, and end when everything that is held has ended."""
        self.is_leaving = True
        self.loop.drain()

    @property
    def is_present(self) -> bool:
        return not self.running.done()


class Deployment:
    """Workers and a gateway's client. `begins_s` is the time on the clock at which the load begins."""

    def __init__(self, setting: Setting, observation: Observation) -> None:
        self.clock = VirtualClock()
        self.tiers = setting.tiers
        self.queue = MemoryQueue(self.clock)
        self.workers: list[Worker] = []  # all that there ever were
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # a worker that ended too early
        self._up_s = self.clock.now() + WARM_UP_S + 1.0  # the first workers have warmed up at this time
        self.begins_s = self._up_s + setting.lead_s
        self._setting = setting
        self._observation = observation
        self._events, self._registry = MemoryEventChannel(), MemoryWorkerRegistry(self.clock)
        draw = random.Random(setting.seed).random
        self.client = SchedulerClient(
            self.queue, self._events, self._registry, setting.tiers, self.clock, "gateway", draw
        )

    async def start(self) -> None:
        """Start the first workers and the client. Return when the workers have warmed up."""
        for _ in range(self._setting.workers):
            self.add_worker()
        await self.clock.sleep(self._up_s - self.clock.now())
        await self.client.start()

    def add_worker(self, start_s: float = WARM_UP_S) -> None:
        """Start a worker, which serves after about `start_s`. To warm up, it runs the same steps as a real worker."""
        setting, clock, number = self._setting, self.clock, len(self.workers)
        record = EngineRecord()
        engine = _build_engine(setting, clock, self.begins_s, number, record)
        draw = random.Random(1_000_033 * setting.seed + number).random
        identity = WorkerIdentity(f"worker-{number}", MODEL_NAMES, clock.wall_ms())
        core = setting.build_core(setting.tiers, engine.info, draw, identity.worker_id)
        metrics = WatchedMetrics(setting.tiers, self._observation, number, clock, self.begins_s)
        queue = self.queue.for_worker(identity.worker_id)
        loop = build_loop(StepDriver(core, engine), queue, self._events, self._registry, metrics, clock, identity)
        running = asyncio.create_task(self._serve(loop, core, engine, identity.worker_id, start_s - WARM_UP_S))
        worker = Worker(core, loop, record, running)
        running.add_done_callback(lambda _: self._note_end(worker))
        self.workers.append(worker)

    async def _serve(self, loop: WorkerLoop, core: StepCore, engine: Engine, worker_id: str, loads_s: float) -> None:
        begun_s = self.clock.now()
        while (passed_s := self.clock.now() - begun_s) < loads_s:
            await self._registry.announce_start(WorkerStart(worker_id, "loading the model", passed_s))
            await self.clock.sleep(min(1.0, loads_s - passed_s))
        await warm_up(engine, core.observe_step_time, self.clock, WARM_UP_S)
        await self._registry.withdraw_start(worker_id)
        await loop.run()

    def _note_end(self, worker: Worker) -> None:
        if worker.running.cancelled() or self.failed.done():
            return
        error = worker.running.exception()
        if error is None and not worker.is_leaving:
            error = RuntimeError("a worker stopped while it was needed")
        if error is not None:
            self.failed.set_exception(error)

    async def end(self) -> None:
        """Stop the workers. Unfinished requests go back to the queue, which is discarded with the run."""
        self.failed.cancel()
        await self.client.close()
        for worker in self.workers:
            worker.loop.stop()
        await asyncio.gather(*(worker.running for worker in self.workers))


def _build_engine(
    setting: Setting, clock: VirtualClock, begins_s: float, number: int, record: EngineRecord
) -> WatchedEngine:
    card, drift = setting.card, setting.drift
    modeled = ModeledEngine(
        card.engine_info(),
        clock.sleep,
        card.step_cost(mixed=True),
        card.noise,
        seed=1_000_003 * setting.seed + number,
        decode_cost=card.step_cost(mixed=False),
        prefix_cache=setting.prefix_cache,
        timer=LoopTimer(),
        drift=None if drift is None else lambda now_s: drift(now_s - begins_s),
    )
    return WatchedEngine(modeled, clock.sleep, card.host_overhead_s, record)
