"""Adds claimed requests to the requests that a worker holds, and removes cancelled and lost requests.

The driver is woken after each change. The claimer, the publisher and the lease keeper share one `RequestIntake`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from scheduler.clock import Clock
from scheduler.request import Claimed
from scheduler.request_state import RequestState
from scheduler.worker.core import WorkerCore
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.tracing import RequestTracer


class RequestIntake:
    def __init__(
        self,
        core: WorkerCore,
        metrics: SchedulerMetrics,
        clock: Clock,
        make_room: Callable[[Sequence[str], float], None] | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """`make_room` is called with the ids of requests that may start now, and the time."""
        self._core = core
        self._make_room = make_room
        self._tracer = tracer
        self._metrics = metrics
        self._clock = clock
        self.changed = asyncio.Event()  # set when the driver should look at the requests again
        self.grammar_arrived = asyncio.Event()  # set when a request with a grammar was accepted

    def accept(self, claimed: Sequence[Claimed]) -> None:
        """Hand claimed requests to the core."""
        self._core.accept(claimed, self._clock.now(), self._clock.wall_ms())
        if any(c.request.sampling.grammar is not None for c in claimed):
            self.grammar_arrived.set()
        self.announce([c.request.id for c in claimed])

    def announce(self, request_ids: Sequence[str]) -> None:
        """Make room in the step in flight for requests that may start now, and wake the driver."""
        if self._make_room is not None:
            self._make_room(request_ids, self._clock.now())
        self.changed.set()

    def drop(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Cancel requests that no client waits for any more. Return those that were held."""
        cancelled = self._core.cancel(request_ids)
        for state in cancelled:
            self._metrics.record_cancelled(state.tier.name)
            if state.marks is not None and self._tracer is not None:
                self._tracer.record(state, self._clock.now())
        if cancelled:
            self.changed.set()
        return cancelled

    def release(self, request_ids: Iterable[str]) -> None:
        """Remove requests whose leases this worker has lost."""
        if self._core.release(request_ids):
            self.changed.set()
