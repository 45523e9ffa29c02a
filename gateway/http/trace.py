"""What a trace is told about the request that is being served. Plain data: nothing here imports OpenTelemetry.

The middleware that the composition root brings begins a trace and sends it when the request has ended
(tidegate/tracing). Without it, what is told is forgotten.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

Value = str | int | float | bool | list[str]


@dataclass(slots=True)
class RequestTrace:
    """The trace of one HTTP request. Times are in ns of Unix time."""

    traceparent: str  # W3C trace context of the request's own span, for the worker; empty: nothing is traced
    attributes: dict[str, Value] = field(default_factory=dict)
    submitted_ns: int | None = None  # when the request was in the queue
    first_token_ns: int | None = None  # when the gateway had the first token

    def note(self, **attributes: Value | None) -> None:
        """Set attributes of the span. Their names have `__` for a dot. None: the attribute is left out."""
        if not self.traceparent:
            return
        found = ((name.replace("__", "."), value) for name, value in attributes.items())
        self.attributes.update((name, value) for name, value in found if value is not None)

    def note_submitted(self) -> None:
        if self.traceparent:
            self.submitted_ns = time.time_ns()

    def note_tokens(self) -> None:
        if self.traceparent and self.first_token_ns is None:
            self.first_token_ns = time.time_ns()


UNTRACED = RequestTrace("")
CURRENT_TRACE: ContextVar[RequestTrace] = ContextVar("CURRENT_TRACE", default=UNTRACED)
