"""Adds claimed requests to the requests that a worker holds, and removes cancelled and lost requests.

The driver is woken after each change. The claimer, the publisher and the lease keeper share one `RequestIntake`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from scheduler.clock import Clock
from scheduler.holdings.holdings import Holdings
from scheduler.request import Claimed, Lease
from scheduler.request_state import RequestState
from scheduler.worker.metrics import SchedulerMetrics


class RequestTracer(Protocol):
    """Records the trace of a request that has ended on this worker."""

    def record(self, state: RequestState, now: float) -> None:
        """Record where the time of an ended request went. `now` is the present on the worker's clock."""
        ...


class RequestIntake:
    def __init__(
        self,
        held: Holdings,
        metrics: SchedulerMetrics,
        clock: Clock,
        note_arrived: Callable[[Sequence[str], float], None],
        tracer: RequestTracer | None = None,
    ) -> None:
        """`note_arrived` is called with the ids of requests that may start now, and the time."""
        self._held = held
        self._note_arrived = note_arrived
        self._tracer = tracer
        self._metrics = metrics
        self._clock = clock
        self.changed = asyncio.Event()  # set when the driver should look at the requests again

    def accept(self, claimed: Sequence[Claimed]) -> None:
        self._held.accept(claimed, self._clock.now(), self._clock.wall_ms())
        self.announce([c.request.id for c in claimed])

    def announce(self, request_ids: Sequence[str]) -> None:
        """Tell the driver of requests that may start now, and wake it."""
        self._note_arrived(request_ids, self._clock.now())
        self.changed.set()

    def drop(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Cancel requests that no client waits for any more. Return those that were held."""
        cancelled = self._held.cancel(request_ids)
        for state in cancelled:
            self._metrics.record_cancelled(state.tier.name)
            if state.marks is not None and self._tracer is not None:
                self._tracer.record(state, self._clock.now())
        if cancelled:
            self.changed.set()
        return cancelled

    # -- leases (`scheduler.worker.leases.LeaseHolder`) ---------------------------------------------------------

    def leases(self) -> list[Lease]:
        return [state.lease for state in self._held.states]

    def release(self, ids: Iterable[str]) -> None:
        if self._held.release(ids):
            self.changed.set()

    def release_all(self) -> list[Lease]:
        return self._held.release_all()
