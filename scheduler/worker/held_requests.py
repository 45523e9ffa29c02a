"""Changes from outside to the requests that a worker holds: claimed ones come in, cancelled and lost ones go.

Wakes the step loop after each change. The claimer, the publisher and the lease keeper share one `HeldRequests`.
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
        self.changed = asyncio.Event()  # set: the step loop should look again

    def accept(self, claimed: Sequence[Claimed]) -> None:
        """Hand claimed requests to the core. Evict bulk from the step in flight where that lets one of them start
        sooner and is worth it."""
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
        """Leave requests to other workers, which hold their leases now."""
        if self._core.release(request_ids):
            self.changed.set()
