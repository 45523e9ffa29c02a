"""A deployment in one process and in virtual time: N workers and the client of a gateway, on one queue.

It connects modeled engines to the shipped loop, core, controller, memory queue and client, as
`tidegate.worker.engine_worker` does with a real engine. So the simulator has no scheduler of its own. Knows the parts;
does not know the traffic (see `clients`).
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.interface import Engine, EngineInfo
from engine.modeled.engine import ModeledEngine
from engine.modeled.timer import LoopTimer
from loadtest.simulation.cost_card import CostCard
from loadtest.simulation.observation import EngineRecord, Observation
from loadtest.simulation.watched import WatchedEngine, WatchedMetrics
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import StepCore
from scheduler.drivers.steps.driver import StepDriver
from scheduler.drivers.steps.warmup import warm_up
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.memory import MemoryWorkerRegistry
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
    controller = SLAController(tiers, info.step_eviction, info.num_layers)
    return StepCore(tiers, info, controller, draw=draw, worker_id=worker_id)


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a run, except its traffic.

    Closed loops fill the engines for `lead_s` before the load begins. `drift` maps the seconds since the load began to
    a factor on step times.
    """

    tiers: TierSet
    card: CostCard
    workers: int = 1
    seed: int = 0
    prefix_cache: bool = False
    lead_s: float = 0.0
    drift: Callable[[float], float] | None = None
    build_core: BuildCore = build_core


@dataclass(frozen=True, slots=True)
class Worker:
    core: StepCore
    loop: WorkerLoop
    record: EngineRecord
    running: "asyncio.Task[None]"


@dataclass(frozen=True, slots=True)
class Deployment:
    clock: Clock
    tiers: TierSet
    queue: MemoryQueue
    client: SchedulerClient
    workers: Sequence[Worker]
    begins_s: float  # the time on the clock at which the load begins

    async def end(self) -> None:
        """Stop the workers. Unfinished requests go back to the queue, which is discarded with the run."""
        await self.client.close()
        for worker in self.workers:
            worker.loop.stop()
        await asyncio.gather(*(worker.running for worker in self.workers))


async def start_deployment(setting: Setting, observation: Observation) -> Deployment:
    """Start the workers and the gateway's client. Return when the workers have warmed up.

    To warm up, each worker runs the same synthetic steps as a real worker.
    """
    clock = VirtualClock()
    queue = MemoryQueue(clock)
    events, registry = MemoryEventChannel(), MemoryWorkerRegistry(clock)
    up_s = clock.now() + WARM_UP_S + 1.0  # all workers have warmed up at this time
    begins_s = up_s + setting.lead_s
    workers = []
    for number in range(setting.workers):
        record = EngineRecord()
        engine = _build_engine(setting, clock, begins_s, number, record)
        draw = random.Random(1_000_033 * setting.seed + number).random
        identity = WorkerIdentity(f"worker-{number}", MODEL_NAMES, clock.wall_ms())
        core = setting.build_core(setting.tiers, engine.info, draw, identity.worker_id)
        metrics = WatchedMetrics(setting.tiers, observation, number, clock, begins_s)
        loop = build_loop(
            StepDriver(core, engine), queue.for_worker(identity.worker_id), events, registry, metrics, clock, identity
        )
        running = asyncio.create_task(_serve(loop, core, engine, clock))
        workers.append(Worker(core, loop, record, running))
    await clock.sleep(up_s - clock.now())
    draw = random.Random(setting.seed).random
    client = SchedulerClient(queue, events, registry, setting.tiers, clock, "gateway", draw)
    await client.start()
    return Deployment(clock, setting.tiers, queue, client, workers, begins_s)


async def _serve(loop: WorkerLoop, core: StepCore, engine: Engine, clock: Clock) -> None:
    await warm_up(engine, core.observe_step_time, clock, WARM_UP_S)
    await loop.run()


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
