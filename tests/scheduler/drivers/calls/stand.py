"""A worker with a static endpoint for tests: the real loop on the real store, and an endpoint that a test scripts."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from engine.static.interface import ItemResult, padded
from scheduler.clock import SystemClock
from scheduler.drivers.calls.driver import build_call_loop
from scheduler.drivers.calls.metrics import TaskMetrics
from scheduler.drivers.calls.policy import BatchPolicy
from scheduler.drivers.calls.results import TaskTracer
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.tasks.queue import TaskQueue
from scheduler.tasks.task import StoredTask, Task
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import WorkerLoop
from tests.scheduler.builders import make_tiers
from tests.scheduler.tasks.builders import make_task
from tests.waiting import until

BATCH = 16
TIERS = make_tiers()
Script = Callable[[Sequence[bytes]], list[ItemResult]]


def echo(items: Sequence[bytes]) -> list[ItemResult]:
    return [ItemResult(item) for item in items]


class HurriedClock(SystemClock):
    """A clock by which everything waits for an eighth of its time. Deadlines in the store keep theirs."""

    def now(self) -> float:
        return 8 * super().now()

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 8)


class ScriptedEndpoint:
    """Records each call. A test may replace `script`, and clear `gate` to hold calls back."""

    name = "scripted"

    def __init__(self) -> None:
        self.script: Script = echo
        self.calls: list[list[bytes]] = []  # items of each call, without padding
        self.traceparents: list[str] = []  # of each call
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, items: Sequence[bytes], traceparent: str = "") -> list[ItemResult]:
        assert len(padded(items, BATCH)) == BATCH
        self.calls.append(list(items))
        self.traceparents.append(traceparent)
        await self.gate.wait()
        return self.script(items)

    async def close(self) -> None:
        return None


class Stand:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.clock = HurriedClock()
        self.endpoint = ScriptedEndpoint()
        self.queue = TaskQueue(redis, self.clock)
        self.registry = RedisWorkerRegistry(redis)
        self.collector = CollectorRegistry()
        self.metrics = TaskMetrics(self.collector, TIERS)
        self.tracer: TaskTracer | None = None
        self._running: list[asyncio.Task[None]] = []

    def start(self, worker_id: str = "w1") -> tuple[WorkerLoop, "asyncio.Task[None]"]:
        queue = TaskQueue(self._redis, self.clock, worker_id)
        policy = BatchPolicy(TIERS, BATCH, self.clock.now())
        identity = WorkerIdentity(worker_id, (), self.clock.wall_ms())
        loop = build_call_loop(
            self.endpoint, policy, queue, self.registry, self.metrics, self.clock, identity, self.tracer
        )
        running = asyncio.create_task(loop.run())
        self._running.append(running)
        return loop, running

    async def kill(self, running: "asyncio.Task[None]") -> None:
        """End a loop as a SIGKILL would: it gives nothing back."""
        running.cancel()
        await asyncio.wait([running])

    async def put(
        self, items: Iterable[bytes], tier: str = "realtime", age_ms: int = 0, timeout_ms: int | None = None
    ) -> list[Task]:
        now_ms = self.clock.wall_ms()
        tasks = [make_task(item, tier, now_ms - age_ms, timeout_ms=timeout_ms) for item in items]
        assert await self.queue.put(tasks, limit=100_000) is None
        return tasks

    async def states(self, tasks: Sequence[Task]) -> list[StoredTask]:
        return [stored for stored in await self.queue.find([t.id for t in tasks]) if stored is not None]

    async def ended(self, tasks: Sequence[Task], timeout_s: float = 30.0) -> list[StoredTask]:
        """Wait until all tasks have ended, and return them."""

        async def have_ended(some: Sequence[Task]) -> bool:
            return all(s.state.is_end for s in await self.states(some))

        for begin in range(0, len(tasks), 100):
            await until(partial(have_ended, tasks[begin : begin + 100]), timeout_s)
        return await self.states(tasks)

    def metric(self, name: str, **labels: str) -> float:
        return self.collector.get_sample_value(f"tidegate_{name}", labels) or 0.0

    async def close(self) -> None:
        for running in self._running:
            await self.kill(running)
        await self.queue.close()
