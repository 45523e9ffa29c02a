"""One worker for batch lines: a real or a modeled engine behind the shipped step loop, with queue and events in memory.

Lines are put into the queue as a gateway does: so many in flight at the same time, each with a later deadline than the
line before it. No interactive traffic runs. Knows requests and their tokens; does not know orders.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from engine.interface import Engine
from engine.modeled.engine import ModeledEngine
from engine.modeled.timer import LoopTimer
from loadtest.calibration.stepper import greedy
from loadtest.simulation.cost_card import CostCard
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.events.memory import MemoryEventChannel
from scheduler.planning.core import SchedulerCore
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.request import Delivery, Request
from scheduler.worker.assembly import build_loop
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.warmup import warm_up

NAME = "benchmark"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a job took, in seconds, and the tokens that it took them for."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens a second, whether they were computed or found in the cache."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class LineFailed(Exception):
    """Raised if the engine refuses a line."""


def modeled_engine(card: CostCard, kv_tokens: int, clock: Clock) -> Engine:
    """Return an engine in virtual time without noise, with room for `kv_tokens` tokens."""
    info = replace(card.engine_info(), num_blocks=kv_tokens // card.block_size)
    cost, decode_cost = card.step_cost(mixed=True), card.step_cost(mixed=False)
    return ModeledEngine(
        info, clock.sleep, cost, noise=0.0, decode_cost=decode_cost, prefix_cache=True, timer=LoopTimer()
    )


class BatchWorker:
    """A worker that runs one job after the other."""

    def __init__(self, engine: Engine, tiers: TierSet, clock: Clock) -> None:
        self._engine = engine
        self._tiers = tiers
        self._clock = clock
        self._queue = MemoryQueue(clock)
        self._events = MemoryEventChannel()
        controller = SLAController(tiers, engine.info.step_eviction, engine.info.num_layers)
        self._core = SchedulerCore(tiers, engine.info, controller)
        self.tier = tiers.batch_tier

    async def start(self) -> None:
        await warm_up(self._engine, self._core.observe_step_time, self._clock)
        await self._events.open(NAME)

    async def run(self, requests: Sequence[Request], in_flight: int) -> Outcome:
        """Run the requests in this order, `in_flight` of them at the same time. Raises `LineFailed`."""
        identity = WorkerIdentity(NAME, (self._engine.info.model_path,), self._clock.wall_ms())
        metrics = SchedulerMetrics(CollectorRegistry(), self._tiers)
        queue, registry = self._queue.for_worker(NAME), MemoryWorkerRegistry(self._clock)
        loop = build_loop(self._core, self._engine, queue, self._events, registry, metrics, self._clock, identity)
        running = asyncio.create_task(loop.run())
        try:
            return await self._feed(requests, in_flight)
        finally:
            loop.drain()
            await running

    async def _feed(self, requests: Sequence[Request], in_flight: int) -> Outcome:
        began_s, waiting = self._clock.now(), deque(requests)
        cached: dict[str, int] = {}
        output_tokens = 0
        open_ = await self._put(waiting, in_flight)
        async for events in self._events.listen(NAME):
            ended = 0
            for event in events:
                if event.error:
                    raise LineFailed(event.error)
                cached[event.request_id] = max(cached.get(event.request_id, 0), event.cached_tokens)
                output_tokens += len(event.token_ids)
                ended += event.is_last
            open_ += await self._put(waiting, ended) - ended
            if not open_:
                break
        prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return Outcome(self._clock.now() - began_s, prompt_tokens, sum(cached.values()), output_tokens)

    async def _put(self, waiting: deque[Request], count: int) -> int:
        """Put the next `count` requests into the queue; return how many there were."""
        group = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        if group:
            await self._queue.put(group)
        return len(group)


def request_of(prompt: Sequence[int], max_tokens: int, number: int, salt: str, tier: str, now_ms: int) -> Request:
    """Return the request of the line that is fed as number `number`. Requests of one `salt` share the prefix cache."""
    return Request(
        id=f"{salt}-{number}",
        tier=tier,
        prompt_token_ids=tuple(prompt),
        sampling=greedy(max_tokens),
        arrival_ms=now_ms,
        deadline_ms=now_ms + 86_400_000 + number,
        reply_to=NAME,
        delivery=Delivery.AT_END,
        cache_salt=salt,
    )
