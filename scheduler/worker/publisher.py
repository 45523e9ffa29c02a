"""Publishes a worker's token events in the order of the steps, and then acknowledges the leases of ended requests.

While a message is being sent, the reports of later steps are merged. So a store that is slow for a moment gets fewer
and larger messages instead of a growing number of messages. What the store refuses is kept and sent again.
"""

import asyncio
from collections.abc import Sequence

from scheduler.clock import Clock
from scheduler.events.base import EventChannel
from scheduler.holdings.report import Report
from scheduler.queue.base import Queue
from scheduler.request import EventKind, Lease, TokenEvent
from scheduler.store.outage import StoreOutage
from scheduler.worker.checkpoints import MIN_TOKENS, Checkpointer
from scheduler.worker.leases import LEASE_S
from scheduler.worker.request_intake import RequestIntake

FAILURES = (EventKind.FAILED, EventKind.UNAVAILABLE)
RETRY_S = 0.2  # seconds between two attempts while the store refuses writes


class Publisher:
    def __init__(
        self,
        queue: Queue,
        events: EventChannel,
        intake: RequestIntake,
        checkpointer: Checkpointer,
        outage: StoreOutage,
        clock: Clock,
    ) -> None:
        self._queue = queue
        self._events = events
        self._intake = intake
        self._checkpointer = checkpointer
        self._outage = outage
        self._clock = clock
        self._unsent = Report()
        self._changed = asyncio.Event()
        self._closing = False
        self.finished = asyncio.Event()

    def send(self, report: Report) -> None:
        """Hand over the events and leases of a report; `run` sends them."""
        if report.events or report.leases:
            self._unsent.absorb(report)
            self._changed.set()

    def close(self) -> None:
        """Make `run` return when everything is sent. Then `finished` is set."""
        self._closing = True
        self._changed.set()

    async def run(self) -> None:
        """Send reports until `close` was called and everything is sent.

        After `close`, a refusal of the store is raised: a worker that ends must not wait for a full disk.
        """
        while self._unsent.leases or self._unsent.events or not self._closing:
            await self._changed.wait()
            self._changed.clear()
            report, self._unsent = self._unsent, Report()
            if self._closing:
                await self._deliver(report)
            elif not await self._outage.attempt(self._deliver(report)):
                report.absorb(self._unsent)
                self._unsent = report
                await self._clock.sleep(RETRY_S)
                self._changed.set()
        self.finished.set()

    async def _deliver(self, report: Report) -> None:
        """Publish the events first, then acknowledge the leases. `report` keeps what the store has not taken.

        A crash between the two repeats events, but never loses a result. If a gateway ends with events that it has not
        read, the next one gets the parts of its jobs again from their checkpoints.
        """
        await self._withhold_failures(report)
        if report.events:
            for reply_to in await self._events.publish(report.events):
                await self._drop(report.events[reply_to])
            report.events.clear()
        long_enough = [c for c in report.checkpoints if len(c.token_ids) >= MIN_TOKENS]
        if long_enough:
            await self._queue.checkpoint(long_enough)
        if report.leases:
            await self._queue.ack(report.leases)

    async def _withhold_failures(self, report: Report) -> None:
        """Remove the failures of requests whose leases were lost: another worker serves them."""
        failed = [e for events in report.events.values() for e in events if e.kind in FAILURES]
        if not failed:
            return
        kept = await self._queue.renew([Lease(e.request_id, e.fence) for e in failed], LEASE_S)
        lost = {(e.request_id, e.fence) for e, is_kept in zip(failed, kept, strict=True) if not is_kept}
        for reply_to, events in list(report.events.items()):
            report.events[reply_to] = [e for e in events if (e.request_id, e.fence) not in lost]

    async def _drop(self, events: Sequence[TokenEvent]) -> None:
        """Drop the unfinished requests of `events`, because their gateway is gone."""
        ended = {e.request_id for e in events if e.is_last}
        unfinished = [i for i in dict.fromkeys(e.request_id for e in events) if i not in ended]
        await self._checkpointer.save_parts(self._intake.drop(unfinished))
        await self._queue.cancel(unfinished)
