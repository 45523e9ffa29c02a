"""Tells the store which suspects are in the worker's steps, so that only they are blamed if the worker dies.

A worker that dies cannot say anything any more, so the store must know it before each step. Writes only what has
changed, and nothing at all while no request is suspect. Which requests are suspect is decided by
`scheduler.drivers.steps.isolation`.
"""

import asyncio

from scheduler.drivers.steps.isolation import Isolation
from scheduler.queue.base import Queue
from scheduler.request import Lease
from scheduler.store.outage import StoreOutage


class StepMarks:
    def __init__(self, isolation: Isolation, queue: Queue, outage: StoreOutage) -> None:
        self._isolation = isolation
        self._queue = queue
        self._outage = outage
        self._waits: dict[Lease, bool] = {}  # what the store knows; a request without a mark counts as in a step
        self._alone: Lease | None = None
        self._lock = asyncio.Lock()  # the driver and the compiler of grammars write

    async def write(self) -> None:
        """Bring the marks in the store up to date. Call it before each step."""
        if not (self._isolation.has_suspects or self._waits or self._alone):
            return
        async with self._lock:
            waits, alone = self._isolation.marks()
            changed = {lease: waiting for lease, waiting in waits.items() if self._waits.get(lease, False) != waiting}
            is_known = not changed and alone == self._alone
            if is_known or await self._outage.attempt(self._queue.note_step(changed, alone)):
                self._waits, self._alone = waits, alone
