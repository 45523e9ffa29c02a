"""A worker for tests whose answers are scripted. It uses the queue as a real one does: leases, acks, cancels."""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from engine.interface import FinishReason
from scheduler.clock import Clock, SystemClock
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.registry.worker_status import Beat, TierCapacity, TierStatus, WorkerStatus
from scheduler.request import Claimed, Delivery, EventKind, Lease, Request, TokenEvent
from tests.gateway.tiny_model import CONTEXT, MODEL, pretrained, token_ids

FINISHED_PER_S = {
    "realtime": 0.1,
    "bulk": 0.05,
}  # finished requests per second that the worker announces, for Retry-After

PAGE = "http://w1/metrics"  # of the scripted worker

Scripting = Callable[[Request], Sequence[TokenEvent]]


def answer_with(text: str, *, reason: FinishReason = FinishReason.STOP, cached: int = 0) -> Scripting:
    """Return a script that answers `text`, one token per event, the last one with the finish."""
    return lambda request: token_by_token(request, token_ids(text), reason, cached)


def token_by_token(
    request: Request, ids: Sequence[int], reason: FinishReason = FinishReason.STOP, cached: int = 0
) -> list[TokenEvent]:
    steps = [
        TokenEvent(request.id, EventKind.TOKENS, i, (token,), cached_tokens=cached) for i, token in enumerate(ids[:-1])
    ]
    last = TokenEvent(request.id, EventKind.FINISHED, len(ids) - 1, tuple(ids[-1:]), reason, cached_tokens=cached)
    return [*steps, last]


class EverAlive(MemoryWorkerRegistry):
    """A registry whose workers have beaten again at each read, so that none is silent however slow the test runs."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, ttl_s=math.inf)
        self._beats = count(clock.wall_ms())

    async def workers(self) -> list[WorkerStatus]:
        return [dataclasses.replace(status, at_ms=next(self._beats)) for status in await super().workers()]

    async def beats(self) -> dict[str, Beat]:
        beats = await super().beats()
        return {worker_id: dataclasses.replace(beat, at_ms=next(self._beats)) for worker_id, beat in beats.items()}


@dataclass(slots=True)
class ScriptedWorker:
    """One worker. A test may replace `script` at any time, and clear `gate` to hold all events back."""

    queue: MemoryQueue
    events: MemoryEventChannel
    registry: MemoryWorkerRegistry
    script: Scripting
    capacity: TierCapacity | None = None  # announced for each tier; None: unknown
    sla: str = "{}"  # announced as the explanation of its controller
    claims: bool = True
    served: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    _serving: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def announce(self) -> None:
        tiers = {
            name: TierStatus(batch_size=64, finished_per_s=rate, capacity=self.capacity)
            for name, rate in FINISHED_PER_S.items()
        }
        at_ms = SystemClock().wall_ms()
        status = WorkerStatus(
            "w1", (MODEL,), CONTEXT, len(pretrained()), 0, device="cpu", tiers=tiers, at_ms=at_ms, page=PAGE
        )
        await self.registry.announce(status, self.sla)

    async def run(self) -> None:
        self.gate.set()
        while True:
            limits = {"realtime": 100, "bulk": 100, "batch": 100} if self.claims else {}
            for claimed in await self.queue.claim(limits, lease_s=60, load=0):
                self.served.append(claimed.request)
                self._serving[claimed.request.id] = asyncio.create_task(self._serve(claimed))
            await self.queue.wait_for_work(60)
            for request_id in self.queue.cancelled():
                self.cancelled.append(request_id)
                if (task := self._serving.pop(request_id, None)) is not None:
                    task.cancel()

    def claim_again(self) -> None:
        self.claims = True
        self.queue._wakeups.wake()

    async def _serve(self, claimed: Claimed) -> None:
        request = claimed.request
        events = list(self.script(request))
        if request.delivery is Delivery.AT_END and events:
            ids = tuple(token for event in events for token in event.token_ids)
            last = events[-1]
            logprobs = tuple(found for event in events for found in event.logprobs)
            prompt = events[0].prompt_logprobs
            events = [replace(last, index=0, token_ids=ids, logprobs=logprobs, prompt_logprobs=prompt)]
        for event in events:
            await self.gate.wait()
            await self.events.publish({request.reply_to: [event]})
            await asyncio.sleep(0)
        if events and events[-1].is_last:
            await self.queue.ack([Lease(request.id, claimed.fence)])

    async def stop(self) -> None:
        tasks = list(self._serving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
