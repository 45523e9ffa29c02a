"""What a worker owes to the outside: token events to publish, then leases to acknowledge, in the order of the steps.

Knows the event channel and the queue; not why something is sent. While a message is on its way, the reports of later
steps are merged: a store that is slow for a moment gets fewer and larger messages, not a growing line of them.
"""

import asyncio
from collections.abc import Callable, Sequence

from scheduler.events.base import EventChannel
from scheduler.planning.step_report import StepReport
from scheduler.queue.base import Queue
from scheduler.request import TokenEvent


class Publisher:
    """`drop` is told the ids of requests whose gateway is gone."""

    def __init__(self, queue: Queue, events: EventChannel, drop: Callable[[Sequence[str]], None]) -> None:
        self._queue = queue
        self._events = events
        self._drop = drop
        self._unsent = StepReport()
        self._changed = asyncio.Event()
        self._closing = False

    def send(self, report: StepReport) -> None:
        """Leave a report's events and leases for `run`."""
        if report.events or report.leases:
            self._unsent.absorb(report)
            self._changed.set()

    def close(self) -> None:
        """`run` returns when everything is sent."""
        self._closing = True
        self._changed.set()

    async def run(self) -> None:
        while self._unsent.leases or self._unsent.events or not self._closing:
            await self._changed.wait()
            self._changed.clear()
            report, self._unsent = self._unsent, StepReport()
            await self._deliver(report)

    async def _deliver(self, report: StepReport) -> None:
        """Events first, then acknowledgements: a crash in between repeats events, and never loses a result."""
        for reply_to, events in report.events.items():
            if not await self._events.publish(reply_to, events):
                await self._forget(events)
        if report.leases:
            await self._queue.ack(report.leases)

    async def _forget(self, events: Sequence[TokenEvent]) -> None:
        """Nobody waits any more for what these events belong to."""
        ended = {e.request_id for e in events if e.is_last}
        gone = [i for i in dict.fromkeys(e.request_id for e in events) if i not in ended]
        await self._queue.cancel(gone)
        self._drop(gone)
