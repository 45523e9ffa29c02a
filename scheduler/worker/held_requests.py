"""Adds claimed requests to the requests that a worker holds, and removes cancelled and lost requests.

The driver is woken after each change. The claimer, the publisher and the lease keeper share one `HeldRequests`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from scheduler.clock import Clock
from scheduler.request import Claimed
from scheduler.worker.core import WorkerCore
from scheduler.worker.metrics import SchedulerMetrics


class HeldRequests:
    def __init__(
        self,
        core: WorkerCore,
        metrics: SchedulerMetrics,
        clock: Clock,
        on_accept: Callable[[Sequence[str], float], None] | None = None,
    ) -> None:
        """`on_accept` is called with the ids of newly accepted requests and the time."""
        self._core = core
        self._on_accept = on_accept
        self._metrics = metrics
        self._clock = clock
        self.changed = asyncio.Event()  # set when the driver should look at the requests again

    def accept(self, claimed: Sequence[Claimed]) -> None:
        """Hand claimed requests to the core."""
        now = self._clock.now()
        self._core.accept(claimed, now, self._clock.wall_ms())
        if self._on_accept is not None:
            self._on_accept([c.request.id for c in claimed], now)
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
