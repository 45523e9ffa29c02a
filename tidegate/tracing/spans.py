"""What all spans need: W3C trace contexts, spans below others, errors."""

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

FIRST_ERROR = 500  # HTTP statuses from here on are errors of the server; below, the client's
NOT_SAMPLED = "00"  # the last two digits of a `traceparent` whose spans are not recorded
PROPAGATOR = TraceContextTextMapPropagator()


def context_of(traceparent: str) -> Context:
    """Return the context that a span belongs under; an empty one if `traceparent` is empty or malformed."""
    return PROPAGATOR.extract({"traceparent": traceparent}, context=Context())


def traceparent_of(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def add_child(
    tracer: Tracer, parent: Span, name: str, began_ns: int, ended_ns: int | None, attributes: Attributes = None
) -> Span:
    """Record a span below `parent`. Times are ns of Unix time; None: now."""
    child = tracer.start_span(name, set_span_in_context(parent, Context()), attributes=attributes, start_time=began_ns)
    child.end(ended_ns)
    return child


def fail(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR))


def name_by_operation(span: Span, attributes: Attributes) -> None:
    """Rename a span as the conventions for generative AI want it: by its operation and model, once they are known."""
    if attributes and (model := attributes.get("gen_ai.request.model")):
        span.update_name(f"{attributes['gen_ai.operation.name']} {model}")
