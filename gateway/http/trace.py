"""What a trace is told about the request that is being served. Plain data: nothing here imports OpenTelemetry.

The middleware that the composition root brings begins a trace and sends it when the request has ended
(tidegate/tracing). Without it there is no trace, and the code that would tell it something only finds that out.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

Value = str | int | float | bool | list[str]


@dataclass(slots=True)
class RequestTrace:
    """The trace of one HTTP request. Times are in ns of Unix time."""

    traceparent: str  # W3C trace context of the request's own span, for the worker
    attributes: dict[str, Value] = field(default_factory=dict)
    submitted_ns: int | None = None  # when the request was in the queue
    first_token_ns: int | None = None  # when the gateway had the first token

    def note(self, **attributes: Value | None) -> None:
        """Set attributes of the span. Their names have `__` for a dot. None: the attribute is left out."""
        found = ((name.replace("__", "."), value) for name, value in attributes.items())
        self.attributes.update((name, value) for name, value in found if value is not None)

    def note_submitted(self) -> None:
        self.submitted_ns = time.time_ns()

    def note_tokens(self) -> None:
        if self.first_token_ns is None:
            self.first_token_ns = time.time_ns()


CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("CURRENT_TRACE", default=None)
