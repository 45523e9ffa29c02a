"""The gateway's side of the scheduler: submit requests, receive their token events, cancel.

Knows the queue, the event channel and which workers live. Does not know HTTP or text. A gateway has exactly
one client; its id names the event stream that workers reply to.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import structlog

from scheduler.client import rejection
from scheduler.client.admission import Gate
from scheduler.client.rejection import Rejected
from scheduler.client.token_stream import TokenStream
from scheduler.client.ttft_forecast import Forecast
from scheduler.clock import Clock
from scheduler.config import Tier, TierSet
from scheduler.events.base import EventChannel
from scheduler.queue.base import Backlog, Queue, QueueFull, TooFarBehind
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import EventKind, Request, TokenEvent

log = structlog.get_logger()

REFRESH_S = 1.0  # how often the list of live workers is read
CHECK_EVERY = 3  # refreshes; whoever waits for a request that no longer exists learns it within two checks
WORKER_GRACE_S = 20.0  # a worker may be restarting this long before new requests are refused


class SchedulerClient:
    """Owner of the gateway's event stream and of the table of requests awaiting events."""

    def __init__(
        self,
        queue: Queue,
        events: EventChannel,
        registry: WorkerRegistry,
        tiers: TierSet,
        clock: Clock,
        gateway_id: str,
    ) -> None:
        self._queue = queue
        self._events = events
        self._registry = registry
        self._tiers = tiers
        self._clock = clock
        self._gate = Gate(tiers)
        self.gateway_id = gateway_id
        self._waiting: dict[str, TokenStream] = {}
        self._entering: set[str] = set()  # those of them whose `put` has not returned
        self._missing: set[str] = set()  # those of them that the queue did not know at the last check
        self._given_up: list[str] = []  # failed here, perhaps still worked on; cancelled by `close`
        self._withdrawals: set[asyncio.Task[None]] = set()
        self._workers: list[WorkerStatus] = []
        self._worker_seen_s: float | None = None
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._events.open(self.gateway_id)
        await self._refresh()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._keep_fresh())]

    async def close(self) -> None:
        """Stop listening. Whatever still waits is cancelled; workers learn that nobody listens here any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._withdrawals, return_exceptions=True)
        try:
            await self._queue.cancel([*self._waiting, *self._given_up])
        finally:
            await self._events.close()

    def drain(self) -> None:
        """Refuse new requests from now on; those under way go on."""
        self._draining = True

    def fail_open(self, message: str) -> None:
        """End every open generation now, each with a FAILED event that says `message`. Later events of their
        requests are ignored; `close` cancels them."""
        self._given_up += self._waiting
        self._fail(list(self._waiting), message)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def workers(self) -> list[WorkerStatus]:
        """Workers alive at the last refresh."""
        return self._workers

    @property
    def tiers(self) -> TierSet:
        """Those in force."""
        return self._tiers

    def reconfigure(self, tiers: TierSet) -> None:
        """Other tiers from now on; requests under way are not touched."""
        self._tiers = tiers
        self._gate.reconfigure(tiers)

    async def worker_sla(self) -> dict[str, str]:
        """What each worker's controller does and why, as a JSON object, by worker id."""
        return await self._registry.sla()

    async def worker_metrics(self) -> dict[str, str]:
        """The workers' own metrics, as Prometheus text, by worker id."""
        return await self._registry.metrics()

    async def depths(self) -> dict[str, int]:
        return await self._queue.depths(list(self._tiers.tiers))

    async def backlogs(self) -> dict[str, Backlog]:
        """What waits in each tier, with its tokens."""
        return await self._queue.backlogs(list(self._tiers.tiers))

    def predicted_ttfts_s(self, backlogs: Mapping[str, Backlog]) -> dict[str, float]:
        """When a short request that came now would get its first token, by tier, as far as that can be foretold."""
        now = self._clock.now()
        predicted = {t.name: self._gate.predicted_ttft_s(t, backlogs, now) for t in self._tiers.tiers.values()}
        return {tier: seconds for tier, seconds in predicted.items() if seconds is not None}

    async def submit(self, requests: Sequence[Request]) -> TokenStream | Rejected:
        """Enqueue `requests` (of one tier), all or none."""
        if self._draining:
            return rejection.draining()
        if not self._has_engine():
            return rejection.no_engine()
        tier = self._tiers.tiers.get(requests[0].tier)
        if tier is None:
            return rejection.tier_gone(requests[0].tier)
        forecast = self._gate.forecast(tier, requests, self._clock.now(), self._clock.wall_ms())
        rejected = self._gate.check_local(tier, forecast) if forecast is not None else None
        if rejected is not None:
            return rejected
        generation = TokenStream(self.cancel, requests)
        refused = await self._enter(generation, tier, requests, forecast)
        match refused:
            case QueueFull():
                return rejection.queue_full(tier, refused.depth, self._workers)
            case TooFarBehind() if forecast is not None:
                return self._gate.refuse(tier, forecast, refused.ahead)
        if forecast is not None:
            self._gate.admitted(tier)
        return generation

    async def _enter(
        self, generation: TokenStream, tier: Tier, requests: Sequence[Request], forecast: Forecast | None
    ) -> QueueFull | TooFarBehind | None:
        """Counted as under way before anything is awaited: whoever comes meanwhile sees it."""
        request_ids = [request.id for request in requests]
        self._waiting.update(dict.fromkeys(request_ids, generation))  # the first event may come before `put` returns
        self._entering.update(request_ids)
        self._gate.enter(tier, requests, forecast, self._clock.now())
        ahead = self._gate.limit(tier, forecast) if forecast is not None else None
        try:
            refused = await self._queue.put(requests, tier.queue_limit, ahead)
        except BaseException:
            self._forget(request_ids)
            self._withdraw(request_ids)
            raise
        finally:
            self._entering.difference_update(request_ids)
        if refused is not None:
            self._forget(request_ids)
        return refused

    async def cancel(self, request_ids: Sequence[str]) -> None:
        self._forget(request_ids)
        await self._queue.cancel(request_ids)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._gate.leave(request_id)

    def _withdraw(self, request_ids: Sequence[str]) -> None:
        """Cancel what an interrupted `put` may have entered all the same, without keeping its caller."""

        async def withdraw() -> None:
            try:
                await self._queue.cancel(request_ids)
            except Exception as error:  # the store is away, probably for the `put`, too
                log.warning("requests not withdrawn", error=str(error))

        task = asyncio.create_task(withdraw())
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    def _fail(self, request_ids: Sequence[str], message: str) -> None:
        """Deliver a last event of our own making."""
        self._dispatch([TokenEvent(i, EventKind.FAILED, index=0, error=message) for i in request_ids])

    def _has_engine(self) -> bool:
        if self._workers:
            return True
        seen = self._worker_seen_s
        return seen is not None and self._clock.now() - seen < WORKER_GRACE_S

    async def _receive(self) -> None:
        """A gateway that has gone deaf must not look alive: listening goes on after any error."""
        while True:
            try:
                async for message in self._events.listen(self.gateway_id):
                    self._dispatch(message)
            except Exception:
                log.exception("listening for token events failed")
            await self._clock.sleep(REFRESH_S)

    def _dispatch(self, message: Sequence[TokenEvent]) -> None:
        now = self._clock.now()
        for event in message:
            generation = self._waiting.get(event.request_id)
            if generation is None:
                continue
            if event.is_last:
                del self._waiting[event.request_id]
            self._gate.hear(event, now)
            generation.deliver(event)

    async def _keep_fresh(self) -> None:
        rounds = 0
        while True:
            await self._clock.sleep(REFRESH_S)
            rounds += 1
            try:
                await self._refresh()
                if rounds % CHECK_EVERY == 0:
                    await self._fail_lost()
            except Exception as error:  # the store may be restarting: keep the last view, try again
                log.warning("worker list not refreshed", error=str(error))

    async def _refresh(self) -> None:
        self._workers = await self._registry.workers()
        self._gate.see(self._workers, self._clock.now(), self._clock.wall_ms())
        if self._workers:
            self._worker_seen_s = self._clock.now()

    async def _fail_lost(self) -> None:
        """Fail what the queue does not know any more (its record went with a failover, its last event with a stream).
        Only what is missing twice running: a request that has just ended has its last event on the way."""
        asked = [i for i in self._waiting if i not in self._entering]
        known = await self._queue.known(asked) if asked else []
        missing = {i for i, is_known in zip(asked, known, strict=True) if not is_known}
        lost = [i for i in asked if i in missing and i in self._missing and i in self._waiting]
        self._missing = missing
        if lost:
            log.warning("requests were lost", count=len(lost))
            self._fail(lost, "The request was lost. Please try again.")
