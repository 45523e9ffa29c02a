"""A gateway's client on a stage: tests send it the events of workers."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from engine.interface import FinishReason
from scheduler.client.client import SchedulerClient
from scheduler.client.rejection import Rejected
from scheduler.client.token_stream import TokenStream
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.registry.worker_status import TierStatus, WorkerStatus
from scheduler.request import EventKind, Request, TokenEvent
from scheduler.virtual_time import VirtualClock
from tests.scheduler.builders import make_request, make_tiers
from tests.scheduler.world import run_bounded

MAX_LOGPROBS = 30  # of all streams: one alone may hold 20
PATIENCE_S = 20
HEARTBEAT_S = 1.0  # seconds between two announcements of a worker


class Stage:
    """A client with its queue, event channel and registry. The test acts as the worker.

    `beating` announces the worker `status` every second; a test cancels it to hang the worker."""

    beating: "asyncio.Task[None]"

    def __init__(self, *, scales_from_zero: bool = False) -> None:
        self.clock = VirtualClock()
        self.queue = MemoryQueue(self.clock)
        self.events = MemoryEventChannel()
        self.registry = MemoryWorkerRegistry(self.clock)
        tiers = make_tiers(realtime={"queue_limit": 4, "admission": {"patience_ms": 1000 * PATIENCE_S}})
        self.share = 0.0  # of the spread, at which refused clients come back
        parts = (self.queue, self.events, self.registry)
        self.client = SchedulerClient(
            *parts,
            tiers,
            self.clock,
            "gateway",
            draw=lambda: self.share,
            max_logprobs=MAX_LOGPROBS,
            scales_from_zero=scales_from_zero,
        )
        self.status = WorkerStatus("w", ("model",), 512, 1000, 0, tiers={"realtime": TierStatus()})

    async def announce(self, **tiers: TierStatus) -> None:
        """Announce the worker now, with this status of `tiers` from now on."""
        self.status = replace(self.status, tiers=tiers or self.status.tiers, at_ms=self.clock.wall_ms())
        await self.registry.announce(self.status)

    async def beat(self) -> None:
        while True:
            await self.announce()
            await self.clock.sleep(HEARTBEAT_S)

    async def submit(self, *requests: Request) -> TokenStream:
        outcome = await self.client.submit(requests)
        assert isinstance(outcome, TokenStream)
        return outcome

    async def tell(self, *events: TokenEvent) -> None:
        assert not await self.events.publish({"gateway": events})

    async def depth(self) -> int:
        return (await self.client.depths())["realtime"]


def play(story: Callable[[Stage], Awaitable[None]], *, worker: bool = True, scales_from_zero: bool = False) -> None:
    async def main() -> None:
        stage = Stage(scales_from_zero=scales_from_zero)
        stage.beating = asyncio.create_task(stage.beat())
        if not worker:
            stage.beating.cancel()
        await asyncio.sleep(0)
        await stage.client.start()
        try:
            await story(stage)
        finally:
            stage.beating.cancel()
            await stage.client.close()

    run_bounded(main())


def tokens(index: int, *token_ids: int, of: str = "r") -> TokenEvent:
    return TokenEvent(of, EventKind.TOKENS, index, token_ids)


def finished(index: int, *token_ids: int, of: str = "r") -> TokenEvent:
    return TokenEvent(of, EventKind.FINISHED, index, token_ids, FinishReason.LENGTH)


async def received(stream: TokenStream) -> list[TokenEvent]:
    async with stream as events:
        return [event async for event in events]


async def refused(stage: Stage, *requests: Request) -> Rejected:
    outcome = await stage.client.submit(requests or [make_request("x")])
    assert isinstance(outcome, Rejected)
    assert 1 <= outcome.retry_after_s <= 120
    return outcome
