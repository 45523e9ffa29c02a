"""Publishes a worker's token events, then acknowledges the leases of ended requests, in the order of the steps.

While a message is on its way, the reports of later steps are merged: a store that is slow for a moment gets fewer and
larger messages, not a growing line of them.
"""

import asyncio
from collections.abc import Sequence

from scheduler.events.base import EventChannel
from scheduler.planning.step_report import StepReport
from scheduler.queue.base import Queue
from scheduler.request import TokenEvent
from scheduler.worker.held_requests import HeldRequests


class Publisher:
    def __init__(self, queue: Queue, events: EventChannel, held: HeldRequests) -> None:
        self._queue = queue
        self._events = events
        self._held = held
        self._unsent = StepReport()
        self._changed = asyncio.Event()
        self._closing = False

    def send(self, report: StepReport) -> None:
        """Leave a report's events and leases for `run`."""
        if report.events or report.leases:
            self._unsent.absorb(report)
            self._changed.set()

    def close(self) -> None:
        """Let `run` return when everything is sent."""
        self._closing = True
        self._changed.set()

    async def run(self) -> None:
        while self._unsent.leases or self._unsent.events or not self._closing:
            await self._changed.wait()
            self._changed.clear()
            report, self._unsent = self._unsent, StepReport()
            await self._deliver(report)

    async def _deliver(self, report: StepReport) -> None:
        """Publish events first, then acknowledge: a crash in between repeats events and never loses a result."""
        for reply_to, events in report.events.items():
            if not await self._events.publish(reply_to, events):
                await self._drop(events)
        if report.leases:
            await self._queue.ack(report.leases)

    async def _drop(self, events: Sequence[TokenEvent]) -> None:
        """Drop the unfinished requests of these events: their gateway is gone."""
        ended = {e.request_id for e in events if e.is_last}
        unfinished = [i for i in dict.fromkeys(e.request_id for e in events) if i not in ended]
        await self._queue.cancel(unfinished)
        self._held.drop(unfinished)
