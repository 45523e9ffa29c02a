"""W3C trace contexts: from a `traceparent` to OpenTelemetry's context, and back."""

from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

FIRST_ERROR = 500  # HTTP statuses from here on are errors of the server; below, the client's
NOT_SAMPLED = "00"  # the last two digits of a `traceparent` whose spans are not recorded

_propagator = TraceContextTextMapPropagator()


def context_of(traceparent: str) -> Context:
    """Return the context that a span belongs under; an empty one if `traceparent` is empty or malformed."""
    return _propagator.extract({"traceparent": traceparent}, context=Context())


def traceparent_of(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
