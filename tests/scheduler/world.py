"""The shipped loop, queue, events and client wired together, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from engine.interface import EngineInfo, FinishReason
from engine.modeled.engine import ModeledEngine
from engine.modeled.timer import LoopTimer
from engine.step_time.cost import StepCost
from scheduler.client.client import SchedulerClient
from scheduler.client.rejection import Rejected
from scheduler.client.token_stream import TokenStream
from scheduler.config import TierSet
from scheduler.drivers.steps.driver import StepDriver
from scheduler.drivers.steps.step_log import StepLog
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.base import Queue
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.request import Request, TokenEvent
from scheduler.virtual_time import VirtualClock, run_virtual
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import SchedulerLoop, build_loop
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.request_intake import RequestTracer
from tests.scheduler.builders import FAST, CheckedCore, make_core, make_info, make_request, make_tiers

T = TypeVar("T")


@dataclass
class Answer:
    """What a client received for one request, and when."""

    request: Request
    submitted_s: float
    events: list[TokenEvent] = field(default_factory=list)
    first_token_s: float | None = None
    ended_s: float | None = None

    @property
    def token_ids(self) -> list[int]:
        return [t for e in self.events for t in e.token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.events[-1].finish_reason if self.events else None

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None, f"{self.request.id} got no token"
        return self.first_token_s - self.submitted_s


@dataclass
class World:
    """One gateway's client and one worker on one queue, in virtual time."""

    clock: VirtualClock
    tiers: TierSet
    queue: MemoryQueue  # the gateway's handle
    events: MemoryEventChannel
    registry: MemoryWorkerRegistry
    client: SchedulerClient
    core: CheckedCore
    engine: ModeledEngine
    loop: SchedulerLoop
    worker_queue: Queue  # the worker's handle
    metrics: SchedulerMetrics
    prometheus: CollectorRegistry
    running: asyncio.Task[None]
    answers: dict[str, Answer] = field(default_factory=dict)

    def request(
        self, request_id: str, tier: str = "realtime", prompt: int = 32, max_tokens: int = 8, **more: Any
    ) -> Request:
        """Return a request that arrives now."""
        now_ms = self.clock.wall_ms()
        more.setdefault("deadline_ms", now_ms + self.tiers[tier].deadline_ms)
        return make_request(request_id, tier, prompt, max_tokens, arrival_ms=now_ms, **more)

    async def submit(self, *requests: Request) -> TokenStream:
        outcome = await self.client.submit(requests)
        assert not isinstance(outcome, Rejected), outcome
        return outcome

    async def ask(
        self, request_id: str, tier: str = "realtime", prompt: int = 32, max_tokens: int = 8, **more: Any
    ) -> Answer:
        """Send a request now and receive it to its end."""
        request = self.request(request_id, tier, prompt, max_tokens, **more)
        answer = self.answers[request_id] = Answer(request, self.clock.now())
        async with await self.submit(request) as events:
            async for event in events:
                answer.events.append(event)
                if event.token_ids and answer.first_token_s is None:
                    answer.first_token_s = self.clock.now()
        answer.ended_s = self.clock.now()
        return answer

    async def settle(self) -> None:
        """Run everything that needs no time."""
        await self.clock.sleep(1e-6)


def run_world(
    story: Callable[[World], Awaitable[T]],
    *,
    tiers: TierSet | None = None,
    info: EngineInfo | None = None,
    cost: StepCost = FAST,
    known: StepCost | None = None,
    noise: float = 0.0,
    seed: int = 0,
    prefix_cache: bool = False,
    tracer: RequestTracer | None = None,
) -> T:
    """Play `story` in virtual time, then drain the worker. `cost`: real costs of the engine; `known`: costs that the
    scheduler knows from the start (None: it learns them)."""

    async def main() -> T:
        world = await start_world(
            tiers or make_tiers(), info or make_info(), cost, known, noise, seed, prefix_cache, tracer=tracer
        )
        try:
            result = await story(world)
        except asyncio.CancelledError:
            if world.running.done():
                world.running.result()  # why the story waits for ever
            raise
        finally:
            await world.client.close()
            world.loop.drain()
        await world.running
        return result

    return run_bounded(main())


def run_bounded(main: Coroutine[Any, Any, T], limit_s: float = 900) -> T:
    """Run `main` in virtual time, and fail if it has not ended within `limit_s`: the loop's maintenance would keep
    virtual time running for ever."""

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await main

    return run_virtual(bounded())


async def start_world(
    tiers: TierSet,
    info: EngineInfo,
    cost: StepCost = FAST,
    known: StepCost | None = None,
    noise: float = 0.0,
    seed: int = 0,
    prefix_cache: bool = False,
    step_log: StepLog | None = None,
    tracer: RequestTracer | None = None,
) -> World:
    clock = VirtualClock()
    queue = MemoryQueue(clock)
    events, registry = MemoryEventChannel(), MemoryWorkerRegistry(clock)
    core = make_core(tiers, info, known)
    engine = ModeledEngine(info, clock.sleep, cost, noise, seed, prefix_cache=prefix_cache, timer=LoopTimer())
    prometheus = CollectorRegistry()
    metrics = SchedulerMetrics(prometheus, tiers)
    identity = WorkerIdentity("worker", ("model",), clock.wall_ms())
    of_worker = queue.for_worker("worker")
    loop = build_loop(
        StepDriver(core, engine, step_log), of_worker, events, registry, metrics, clock, identity, tracer=tracer
    )
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0)  # the worker announces itself
    client = SchedulerClient(queue, events, registry, tiers, clock, "gateway")
    await client.start()
    return World(
        clock, tiers, queue, events, registry, client, core, engine, loop, of_worker, metrics, prometheus, running
    )
