"""The shipped loop, queue, events and client wired together, in virtual time, with either driver."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, NamedTuple, TypeVar

import pytest
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
from scheduler.worker.driver import Driver
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import WorkerLoop, build_loop
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.request_intake import RequestTracer
from tests.scheduler.builders import FAST, NO_PERIOD, make_core, make_info, make_request, make_tiers

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


class Worker(NamedTuple):
    core: Any  # a `CheckedCore` with a `ModeledEngine`, or a `StreamCore` with a `ModeledUpstream`
    engine: Any
    queue: Queue  # its own handle
    metrics: SchedulerMetrics
    prometheus: CollectorRegistry
    loop: WorkerLoop
    running: "asyncio.Task[None]"


class UnreadMetrics(SchedulerMetrics):
    """Metrics whose text nobody reads: it takes longer than all else in a second with few requests."""

    def text(self) -> str:
        return ""


class World:
    """One gateway's client and one worker on one queue, in virtual time. A test may add workers."""

    def __init__(self, tiers: TierSet) -> None:
        self.clock = VirtualClock()
        self.tiers = tiers
        self.queue = MemoryQueue(self.clock)  # the gateway's handle
        self.events, self.registry = MemoryEventChannel(), MemoryWorkerRegistry(self.clock)
        self.client = SchedulerClient(self.queue, self.events, self.registry, tiers, self.clock, "gateway")
        self.answers: dict[str, Answer] = {}

    def add_worker(
        self, driver: Driver, engine: Any, worker_id: str, incarnation: str = "", vocabulary: str = "", **more: Any
    ) -> Worker:
        """Begin a worker. `more`: further arguments of `build_loop`."""
        prometheus = CollectorRegistry()
        identity = WorkerIdentity(worker_id, ("model",), self.clock.wall_ms(), incarnation, vocabulary=vocabulary)
        queue, metrics = self.queue.for_worker(identity.holder), UnreadMetrics(prometheus, self.tiers)
        loop = build_loop(driver, queue, self.events, self.registry, metrics, self.clock, identity, **more)
        return Worker(driver.core, engine, queue, metrics, prometheus, loop, asyncio.create_task(loop.run()))

    def begin_worker(self, driver: Driver, engine: Any, **more: Any) -> None:
        """Begin the world's own worker, or its successor under the same name."""
        worker = self.add_worker(driver, engine, "worker", **more)
        self.core, self.engine, self.worker_queue, self.metrics, self.prometheus, self.loop, self.running = worker

    async def kill_worker(self) -> None:
        """End the worker as a SIGKILL would: it gives nothing back."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    async def worker_fails(self, error: type[BaseException], match: str | None = None) -> None:
        """Wait until the worker has ended with this error."""
        with pytest.raises(error, match=match):
            await self.running
        self.running = asyncio.create_task(asyncio.sleep(0))

    def request(
        self, request_id: str, tier: str = "realtime", prompt: Any = 32, max_tokens: int = 8, **more: Any
    ) -> Request:
        """Return a request that arrives now."""
        now_ms = self.clock.wall_ms()
        more.setdefault("deadline_ms", now_ms + self.tiers[tier].deadline_ms)
        return make_request(request_id, tier, prompt, max_tokens, arrival_ms=now_ms, **more)

    async def submit(self, *requests: Request) -> TokenStream:
        outcome = await self.client.submit(requests)
        assert not isinstance(outcome, Rejected), outcome
        return outcome

    async def ask(self, request_id: str, *request: Any, **more: Any) -> Answer:
        """Send a request now, with the arguments of `request`, and receive it to its end."""
        return await self.receive(self.request(request_id, *request, **more))

    async def receive(self, request: Request) -> Answer:
        answer = self.answers[request.id] = Answer(request, self.clock.now())
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


Story = Callable[[World], Awaitable[T]]


def run_world(
    story: Story[T],
    *,
    tiers: TierSet | None = None,
    info: EngineInfo | None = None,
    cost: StepCost = FAST,
    known: StepCost | None = None,
    noise: float = 0.0,
    seed: int = 0,
    prefix_cache: bool = False,
    step_log: StepLog | None = None,
    tracer: RequestTracer | None = None,
    period: int = NO_PERIOD,
) -> T:
    """Play `story` in virtual time with a modeled engine, then drain the worker. `cost`: real costs of the engine;
    `known`: costs that the scheduler knows from the start (None: it learns them). `period`: of the engine's outputs."""

    def begin(world: World) -> None:
        core = make_core(world.tiers, info or make_info(), known)
        clock, timer = world.clock, LoopTimer()
        engine = ModeledEngine(
            core._engine, clock.sleep, cost, noise, seed, prefix_cache=prefix_cache, timer=timer, period=period
        )
        world.begin_worker(StepDriver(core, engine, step_log), engine, tracer=tracer)

    return play_in_world(story, tiers or make_tiers(), begin)


def play_in_world(story: Story[T], tiers: TierSet, begin: Callable[[World], None]) -> T:
    """Play `story` in a world whose worker `begin` begins, then drain the worker."""

    async def main() -> T:
        world = World(tiers)
        begin(world)
        await asyncio.sleep(0)  # the worker announces itself
        await world.client.start()
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


def played_by(player: Callable[..., Any], **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Return a decorator for tests that `player` plays with these options, such as `@played_by(run_world, known=FAST)`.
    It gives the first argument of the test, or all before a `/`; pytest gives the others."""

    def decorate(story: Callable[..., Any]) -> Callable[..., None]:
        def test(**arguments: Any) -> None:
            player(lambda *stage: story(*stage, **arguments), **options)

        parameters = [*inspect.signature(story).parameters.values()]
        num_of_player = sum(p.kind is p.POSITIONAL_ONLY for p in parameters) or 1
        update_wrapper(test, story)
        del test.__wrapped__  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature(parameters[num_of_player:])  # type: ignore[attr-defined]
        return test

    return decorate
