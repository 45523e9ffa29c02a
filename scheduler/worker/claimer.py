"""Claims from the queue: as soon as something is put, also while a step runs, so that an arrival is in the very next
step; and whenever room has come up.

Knows the core, the queue and the engine (bulk may leave the running step for what has come). Owner: `SchedulerLoop`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from engine.interface import Engine
from scheduler.clock import Clock
from scheduler.planning.core import SchedulerCore
from scheduler.queue.base import Queue
from scheduler.worker.heartbeat import Heartbeat
from scheduler.worker.maintenance import LEASE_S

YIELD_S = 0.0005  # for each interactive request that it holds, a worker lets others claim first what has just come, …
LONGEST_YIELD_S = 0.01  # … as long as this: whoever has least to do gets it
LISTEN_S = 0.5  # the longest that the queue is listened to without a look at it: bounds a lost wake-up


class Claimer:
    """`taken` is called after something was accepted; `drop` with the ids of what nobody wants any more."""

    def __init__(
        self,
        core: SchedulerCore,
        engine: Engine,
        queue: Queue,
        heartbeat: Heartbeat,
        clock: Clock,
        taken: Callable[[], None],
        drop: Callable[[Sequence[str]], None],
    ) -> None:
        self._core = core
        self._engine = engine
        self._queue = queue
        self._heartbeat = heartbeat
        self._clock = clock
        self._taken = taken
        self._drop = drop
        self._room = asyncio.Event()
        self._known_empty = False  # the last claim found less than it asked for; nothing was put since
        self._is_open = True

    def note_room(self) -> None:
        """There may be more to claim for."""
        self._room.set()

    def close(self) -> None:
        """Claim nothing more. What is cancelled is dropped all the same."""
        self._is_open = False

    async def run(self) -> None:
        """For ever."""
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
                    await self._let_others_go_first()
                self._drop(self._queue.cancelled())
                if self._is_open:
                    await self._claim()
        finally:
            work.cancel()
            room.cancel()

    async def _let_others_go_first(self) -> None:
        """A worker whose step runs would have new work wait for its end, while another one may be idle."""
        if not self._heartbeat.is_alone and self._core.is_step_in_flight:
            await self._clock.sleep(min(YIELD_S * (1 + self._core.num_interactive), LONGEST_YIELD_S))

    async def _claim(self) -> None:
        limits = self._core.claim_limits(self._clock.now())
        if not limits or self._known_empty:
            return
        claimed = await self._queue.claim(limits, LEASE_S)
        got = Counter(c.request.tier for c in claimed)
        everything_asked = len(limits) == len(self._core.tiers)
        self._known_empty = everything_asked and all(got[tier] < n for tier, n in limits.items())
        if not claimed:
            return
        now = self._clock.now()
        self._core.accept(claimed, now, self._clock.wall_ms())
        evictees = self._core.evictees_for([c.request.id for c in claimed], now)
        if evictees:
            self._engine.evict(evictees)
        self._taken()
