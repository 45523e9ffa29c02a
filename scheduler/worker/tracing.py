"""What records the trace of a request that has ended on this worker. The composition root has one for OpenTelemetry."""

from typing import Protocol

from scheduler.request_state import RequestState


class RequestTracer(Protocol):
    def record(self, state: RequestState, now: float) -> None:
        """Record where the time of an ended request went. `now` is the present on the worker's clock."""
        ...
