"""Helpers of the queue's tests: a clock moved by hand, requests, and a factory for both queues."""

import asyncio
import math
from dataclasses import dataclass, field

from redis.asyncio import Redis

from scheduler.clock import Clock
from scheduler.queue.base import AheadLimit, Queue
from scheduler.queue.memory import MemoryQueue
from scheduler.queue.redis import RedisQueue
from scheduler.request import Claimed, Lease, Request
from scheduler.store.keys import Keys
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler import builders
from tests.waiting import until

START_MS = EPOCH_MS
LEASE_S = 10.0


class ManualClock:
    """A clock that stands still until it is advanced. Sleeping is real."""

    def __init__(self) -> None:
        self.ms = START_MS

    def now(self) -> float:
        return self.ms / 1000

    def wall_ms(self) -> int:
        return self.ms

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def advance(self, seconds: float) -> None:
        self.ms += int(seconds * 1000)


def make_request(
    request_id: str = "r1",
    tier: str = "realtime",
    deadline_ms: int = START_MS + 1000,
    tokens: int = 3,
    output: int = 8,
    job_part: str = "",
) -> Request:
    """Return a small request; the queue's tests count `tokens` and `output`."""
    more = {"deadline_ms": deadline_ms, "reply_to": "gateway-1", "job_part": job_part, "stop_token_ids": (2,)}
    return builders.make_request(request_id, tier, tokens, output, seed=7, **more)


def lease_of(claimed: Claimed) -> Lease:
    return Lease(claimed.request.id, claimed.fence)


def may_wait(
    requests: float = math.inf, seconds: float = math.inf, per_prompt: float = 1.0, per_output: float = 0.0, *above: str
) -> AheadLimit:
    """Return a limit at which, by default, a prompt token takes a second."""
    return AheadLimit(requests, seconds, per_prompt, per_output, above)


def ids(claimed: list[Claimed]) -> list[str]:
    return [c.request.id for c in claimed]


@dataclass(slots=True)
class Handles:
    """Makes handles on one queue: in Redis with a client, otherwise in memory."""

    clock: Clock
    client: Redis | None = None
    _made: dict[str, Queue] = field(default_factory=dict)
    _memory: MemoryQueue | None = None

    def __call__(self, worker_id: str = "") -> Queue:
        if worker_id not in self._made:
            self._made[worker_id] = self._make(worker_id)
        return self._made[worker_id]

    async def close(self) -> None:
        for queue in self._made.values():
            await queue.close()

    def _make(self, worker_id: str) -> Queue:
        if self.client is not None:
            return RedisQueue(self.client, self.clock, worker_id)
        if self._memory is None:
            self._memory = MemoryQueue(self.clock)
        return self._memory.for_worker(worker_id)


async def listening(handles: Handles, worker_id: str) -> Queue:
    """Return a handle that hears of everything that happens from now on, and of nothing that happened before."""
    queue, client = handles(worker_id), handles.client
    await queue.wait_for_work(0.0)  # it begins to listen
    if client is not None:
        await until(lambda: _is_heard(handles, worker_id))
        await client.publish(_channel(handles, worker_id), "cancel:")  # behind the confirmations of its subscription
        await until(lambda: queue.cancelled() == [""])
    await queue.wait_for_work(0.0)
    return queue


def _channel(handles: Handles, worker_id: str) -> str:
    assert handles.client is not None
    return Keys.of(handles.client).wake + worker_id.partition("#")[0]


async def _is_heard(handles: Handles, worker_id: str) -> bool:
    assert handles.client is not None
    [(_, count)] = await handles.client.pubsub_numsub(_channel(handles, worker_id))
    return int(count) > 0


async def has_left(handles: Handles, worker_id: str) -> bool:
    return not await _is_heard(handles, worker_id)


async def waits(handles: Handles, worker_id: str, load: int = 0) -> Queue:
    """Return a worker that waits for a request of either tier."""
    worker = await listening(handles, worker_id)
    assert await worker.claim({"realtime": 2, "bulk": 1}, LEASE_S, load) == []
    return worker
