"""What records the traces of tasks and of their calls. The composition root has one for OpenTelemetry."""

from collections.abc import Sequence
from typing import Protocol

from scheduler.tasks.task import EndedTask, Task


class CallTrace(Protocol):
    """The trace of one call of the endpoint."""

    @property
    def traceparent(self) -> str:
        """The W3C trace context of the call, for the endpoint."""
        ...

    def end(self, outcome: str) -> None: ...


class TaskTracer(Protocol):
    def begin_call(self, tasks: Sequence[Task], batch: int) -> CallTrace:
        """Return the trace of a call with `tasks` in a batch of `batch` places."""
        ...

    def record(self, ended: EndedTask, call: CallTrace | None) -> None:
        """Record where the time of an ended task went. None: its end was no call."""
        ...
