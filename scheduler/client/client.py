"""The gateway's client of the scheduler: it submits requests, receives their token events and cancels requests.

Knows the queue, the event channel and the live workers; does not know HTTP or text. A gateway has exactly one client.
The client's id is the name of the event stream to which workers send the events.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

import structlog

from scheduler.client import rejection
from scheduler.client.admission import Admission, Ticket
from scheduler.client.cancellations import Cancellations
from scheduler.client.engine_wait import EngineWait
from scheduler.client.live_workers import LiveWorkers
from scheduler.client.open_requests import OpenRequests
from scheduler.client.rejection import Rejected
from scheduler.client.scale import DueWork, ScaleSignal, scale_signal
from scheduler.client.token_stream import MAX_LOGPROBS, HeldLogprobs, TokenStream
from scheduler.clock import Clock
from scheduler.config import Tier, TierSet
from scheduler.events.base import EventChannel
from scheduler.queue.base import Backlog, Queue, QueueFull, TooFarBehind
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.heartbeat_monitor import CHECK_S
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import Request, TokenEvent
from scheduler.store.errors import StoreRefused

log = structlog.get_logger()

REFRESH_S = 1.0  # seconds between two reads of the heartbeats and of the waiting work, for admission
CHECK_EVERY = 3  # number of refreshes between two checks; a lost request is failed at the second check after its loss


class SchedulerClient:
    """A gateway's connection to the scheduler. Owns the gateway's event stream and the table of open requests."""

    def __init__(
        self,
        queue: Queue,
        events: EventChannel,
        registry: WorkerRegistry,
        tiers: TierSet,
        clock: Clock,
        gateway_id: str,
        draw: Callable[[], float] = random.random,
        max_logprobs: int = MAX_LOGPROBS,
        queue_bytes: int | None = None,
        *,
        scales_from_zero: bool = False,
    ) -> None:
        """`draw` returns numbers from 0 to 1; they distribute the returns of clients that are refused.

        `max_logprobs` is how many log probabilities all streams may hold. `queue_bytes` is how many bytes may wait in
        the store in all interactive tiers, and likewise in all bulk tiers; None: there is no limit. With
        `scales_from_zero`, workers are started on demand.
        """
        self._queue = queue
        self._events = events
        self.registry = registry
        self.tiers = tiers  # in force
        self._clock = clock
        self._queue_bytes = queue_bytes
        self._draw = draw
        self._admission = Admission(tiers)
        self.gateway_id = gateway_id
        self._open = OpenRequests(self._admission)
        self._cancellations = Cancellations(queue)
        self._held_logprobs = HeldLogprobs(max_logprobs)
        # Ids of requests ended by `fail_open`. A worker may still run them, so `close` cancels them.
        self._failed_here: list[str] = []
        self.live = LiveWorkers(registry, clock)
        self._reported: tuple[Sequence[WorkerStatus], Mapping[str, Backlog]] = (), {}  # at the last refresh
        self.is_draining = False
        self.wait = EngineWait(self.live, tiers, clock, lambda: self.is_draining, scales_from_zero=scales_from_zero)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._events.open(self.gateway_id)
        await self.live.read()
        await self.refresh()
        work = (self._receive(), self._keep_fresh(), self._watch_workers())
        self._tasks = [asyncio.create_task(task) for task in work]

    async def close(self) -> None:
        """Cancel all open requests and stop listening. After that, publishing to this gateway fails."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._cancellations.close([*self._open, *self._failed_here])
        finally:
            await self._events.close()

    def drain(self) -> None:
        """Refuse new requests from now on. Open requests continue."""
        self.is_draining = True

    def fail_open(self, message: str) -> None:
        """End every open request now with an UNAVAILABLE event that says `message`.

        Later events of these requests are ignored, and `close` cancels them.
        """
        self._failed_here += self._open
        self._open.fail(list(self._open), message, self._clock.now())

    @property
    def refusal(self) -> str | None:
        """Why the store takes no writes, as it answered within the last second or two; None if it takes them."""
        refusal = self._cancellations.refusal
        return None if refusal is None else str(refusal)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def reconfigure(self, tiers: TierSet) -> None:
        """Use `tiers` from now on. Open requests are not touched."""
        self.tiers = tiers
        self._admission.reconfigure(tiers)
        self.wait.reconfigure(tiers)

    async def depths(self) -> dict[str, int]:
        """Return the number of waiting requests, by tier."""
        return await self._queue.depths(list(self.tiers.tiers))

    async def backlogs(self) -> dict[str, Backlog]:
        """Return the number of waiting requests and their tokens, by tier."""
        return await self._queue.backlogs(list(self.tiers.tiers))

    async def queue_ages_s(self) -> dict[str, float]:
        """Return how long the request has waited that is claimed next, in seconds, by tier; 0 if no request waits."""
        arrivals, now_ms = await self._queue.head_arrivals(list(self.tiers.tiers)), self._clock.wall_ms()
        return {tier: max(0, now_ms - arrivals.get(tier, now_ms)) / 1000 for tier in self.tiers.tiers}

    def predicted_ttfts_s(self, backlogs: Mapping[str, Backlog]) -> dict[str, float]:
        """Return the predicted TTFT in seconds of a short request that arrives now, by tier.

        Tiers without a prediction are left out.
        """
        now = self._clock.now()
        predicted = {t.name: self._admission.predicted_ttft_s(t, backlogs, now) for t in self.tiers.tiers.values()}
        return {tier: seconds for tier, seconds in predicted.items() if seconds is not None}

    async def refresh(self) -> None:
        """Read the heartbeats and the waiting work, for admission and `scale_signal`. Happens each `REFRESH_S`."""
        workers, backlogs = await self.live.reporting(), await self.backlogs()
        self._reported = workers, backlogs
        self._admission.on_heartbeat(workers, backlogs, self._clock.now(), self._clock.wall_ms())

    def scale_signal(self, due: Sequence[DueWork], *, has_more: bool) -> ScaleSignal:
        """Return how many workers are wanted, as of the last refresh. `due` is the work of batches.

        With `has_more` there is work besides, such as batches of unknown size.
        """
        workers, backlogs = self._reported
        return scale_signal(
            self.tiers.by_priority,
            workers,
            len(self.live.starting),
            backlogs,
            self._admission.output_shares(),
            due,
            has_more=has_more or self.wait.was_asked,
        )

    async def submit(self, requests: Sequence[Request]) -> TokenStream | Rejected:
        """Enqueue all `requests` (of one tier) and return their token stream.

        If the requests are refused, enqueue none of them and return why. Raises `StoreRefused` if the store takes no
        writes.
        """
        outcome = await self._submit(requests)
        return outcome.at(self._draw()) if isinstance(outcome, Rejected) else outcome

    async def _submit(self, requests: Sequence[Request]) -> TokenStream | Rejected:
        if self.is_draining:
            return rejection.draining()
        if not self.wait.accepts(requests[0].tier):
            await self.wait.wait(requests[0])
        if self.is_draining:
            return rejection.draining()
        if not self.wait.accepts(requests[0].tier):
            if (refusal := self._cancellations.refusal) is not None:  # then workers cannot announce themselves
                raise StoreRefused(refusal.cause)
            return rejection.no_engine(self.live.starting)
        ticket = self._admission.begin(requests, self._clock.now(), self._clock.wall_ms())
        if isinstance(ticket, Rejected):
            return ticket
        stream = TokenStream(self.cancel, requests, self._held_logprobs)
        reply = await self._put(ticket, stream)
        return self._admission.settle(ticket, reply) or stream

    async def _put(self, ticket: Ticket, stream: TokenStream) -> QueueFull | TooFarBehind | None:
        request_ids = [request.id for request in ticket.requests]
        self._open.add(request_ids, stream)
        try:
            limit = None if ticket.has_few else ticket.tier.queue_limit
            max_bytes = None if ticket.has_few else self._max_bytes(ticket.tier)
            reply = await self._queue.put(ticket.requests, limit, ticket.ahead, max_bytes, ticket.prefer)
        except StoreRefused:  # then nothing was put
            self._open.forget(request_ids)
            raise
        except BaseException:
            self._open.forget(request_ids)
            self._cancellations.cancel_later(request_ids)  # the queue may have the requests nevertheless
            raise
        finally:
            self._open.note_put(request_ids)
        if reply is not None:
            self._open.forget(request_ids)
        return reply

    def _max_bytes(self, tier: Tier) -> int | None:
        """Return how many bytes may wait in `tier`: its part of those of all interactive or of all bulk tiers."""
        if self._queue_bytes is None:
            return None
        kin = [other for other in self.tiers.tiers.values() if other.is_interactive == tier.is_interactive]
        return self._queue_bytes // max(1, len(kin))

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancel requests. While the store is away or takes no writes, they are cancelled when it is back."""
        self._open.forget(request_ids)
        await self._cancellations.cancel(request_ids)

    async def _receive(self) -> None:
        """Pass token events to their streams, for ever.

        After any error, listening starts again; otherwise the open requests would never end.
        """
        while True:
            try:
                async for message in self._events.listen(self.gateway_id):
                    if questions := self._open.deliver(message, self._clock.now()):
                        await self._answer(questions)
            except StoreRefused:
                pass  # the probe tells of it; nothing is lost, because no worker can send anything now
            except Exception:
                log.exception("listening for token events failed")
            await self._clock.sleep(REFRESH_S)

    async def _answer(self, questions: Sequence[TokenEvent]) -> None:
        """Tell workers that have taken requests over what was received of them, and cancel those that have ended."""
        received, ended = self._open.received(questions, self._clock.now())
        if received:
            await self._queue.resume(received)
        if ended:
            await self._cancellations.cancel(ended)

    async def _keep_fresh(self) -> None:
        rounds = 0
        while True:
            await self._clock.sleep(REFRESH_S)
            rounds += 1
            try:
                await self._cancellations.probe()
                await self.refresh()
                if rounds % CHECK_EVERY == 0:
                    await self._fail_lost()
            except Exception as error:  # the store may be restarting: keep the last data and try again
                log.warning("heartbeats not read", error=str(error))

    async def _watch_workers(self) -> None:
        while True:
            await self._clock.sleep(CHECK_S)
            try:
                await self.live.read()
                self._fail_unserved()
            except Exception as error:  # as above
                log.warning("worker list not refreshed", error=str(error))

    def _fail_unserved(self) -> None:
        """Fail the open interactive requests that have been without a worker for too long."""
        if unserved := self._open.of_tiers(self.wait.tiers_given_up()):
            log.warning("requests failed because no worker is alive", count=len(unserved))
            self._open.fail(unserved, self._why_unserved(), self._clock.now())
            self._open.forget(unserved)
            self._cancellations.cancel_later(unserved)

    def _why_unserved(self) -> str:
        if self.refusal is not None:
            return f"{self.refusal} No token can be passed on until it takes them again."
        reason = rejection.no_engine()
        return f"{reason.message} {reason.advice}"

    async def _fail_lost(self) -> None:
        checked = self._open.to_check()
        lost = self._open.lost(checked, await self._queue.known(checked) if checked else [])
        if lost:
            log.warning("requests were lost", count=len(lost))
            self._open.fail(lost, "The request was lost. Please send it again.", self._clock.now())
