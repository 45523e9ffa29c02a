"""Claims requests from the queue as soon as one is put, also while a step runs, so that it is in the very next step;
and whenever there may be room for more.

Knows the core's limits and the queue; `HeldRequests` takes what was claimed or cancelled.
"""

import asyncio
from collections import Counter

from scheduler.clock import Clock
from scheduler.planning.core import SchedulerCore
from scheduler.queue.base import Queue
from scheduler.worker.heartbeat import Heartbeat
from scheduler.worker.held_requests import HeldRequests
from scheduler.worker.leases import LEASE_S

# A worker with a step in flight waits before it claims new work, so that an idle worker gets that work first: this
# many seconds, once and once more for each interactive request that it holds …
YIELD_S = 0.0005
MAX_YIELD_S = 0.01  # … and at most this many
LISTEN_S = 0.5  # the longest wait for a wake-up from the queue before it is claimed from anyway: bounds a lost wake-up


class Claimer:
    def __init__(
        self, core: SchedulerCore, queue: Queue, held: HeldRequests, heartbeat: Heartbeat, clock: Clock
    ) -> None:
        self._core = core
        self._queue = queue
        self._held = held
        self._heartbeat = heartbeat
        self._clock = clock
        self._room = asyncio.Event()
        self._known_empty = False  # the last claim found less than it asked for, and nothing was put since
        self._is_open = True

    def note_room(self) -> None:
        """There may be room for more requests."""
        self._room.set()

    def close(self) -> None:
        """Claim nothing more. Cancelled requests are still dropped."""
        self._is_open = False

    async def run(self) -> None:
        """Run until cancelled."""
        work = asyncio.create_task(self._queue.wait_for_work(LISTEN_S))
        room = asyncio.create_task(self._room.wait())
        try:
            while True:
                await asyncio.wait((work, room), return_when=asyncio.FIRST_COMPLETED)
                if room.done():
                    self._room.clear()
                    room = asyncio.create_task(self._room.wait())
                if work.done():
                    work.result()
                    work = asyncio.create_task(self._queue.wait_for_work(LISTEN_S))
                    self._known_empty = False
                    await self._yield_to_idle_workers()
                self._held.drop(self._queue.cancelled())
                if self._is_open:
                    await self._claim()
        finally:
            work.cancel()
            room.cancel()

    async def _yield_to_idle_workers(self) -> None:
        """Wait a moment while a step runs here: new work would wait for its end, while another worker may be idle."""
        if not self._heartbeat.is_alone and self._core.is_step_in_flight:
            await self._clock.sleep(min(YIELD_S * (1 + self._core.num_interactive), MAX_YIELD_S))

    async def _claim(self) -> None:
        limits = self._core.claim_limits(self._clock.now())
        if not limits or self._known_empty:
            return
        claimed = await self._queue.claim(limits, LEASE_S)
        got = Counter(c.request.tier for c in claimed)
        asked_of_all = len(limits) == len(self._core.tiers)
        self._known_empty = asked_of_all and all(got[tier] < n for tier, n in limits.items())
        if claimed:
            self._held.accept(claimed)
