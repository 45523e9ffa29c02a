"""Adds claimed requests to the requests that a worker holds, and removes cancelled and lost requests.

The step loop is woken after each change. The claimer, the publisher and the lease keeper share one `HeldRequests`.
"""

import asyncio
from collections.abc import Iterable, Sequence

from engine.interface import Engine
from scheduler.clock import Clock
from scheduler.planning.core import SchedulerCore
from scheduler.request import Claimed
from scheduler.worker.metrics import SchedulerMetrics


class HeldRequests:
    def __init__(self, core: SchedulerCore, engine: Engine, metrics: SchedulerMetrics, clock: Clock) -> None:
        self._core = core
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self.changed = asyncio.Event()  # set when the step loop should look at the requests again

    def accept(self, claimed: Sequence[Claimed]) -> None:
        """Hand claimed requests to the core.

        Also evict bulk sequences from the step in flight, if this lets a claimed request start sooner and is worth the
        lost work.
        """
        now = self._clock.now()
        self._core.accept(claimed, now, self._clock.wall_ms())
        evictees = self._core.evictees_for([c.request.id for c in claimed], now)
        if evictees:
            self._engine.evict(evictees)
        self.changed.set()

    def drop(self, request_ids: Iterable[str]) -> None:
        """Cancel requests that no client waits for any more."""
        cancelled = self._core.cancel(request_ids)
        for state in cancelled:
            self._metrics.record_cancelled(state.tier.name)
        if cancelled:
            self.changed.set()

    def release(self, request_ids: Iterable[str]) -> None:
        """Remove requests whose leases this worker has lost."""
        if self._core.release(request_ids):
            self.changed.set()
