"""The spans of batches: one for each batch, below it one for each line, and below these the spans of the workers.

The span of a batch is below that of the request that created it, and is recorded when the batch is over, maybe by
another gateway than the one that created it. So its id is made from the batch's, and all gateways know it.
"""

import asyncio
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, Tracer

from gateway.http.trace import CURRENT_TRACE, RequestTrace
from gateway.jobs.batches.input.lines import BatchLine
from gateway.jobs.batches.model import Batch, BatchStatus
from scheduler.request import is_sampled
from tidegate.tracing.spans import FIRST_ERROR, NOT_SAMPLED, context_of, fail, name_by_operation, traceparent_of

# Lines of a batch whose spans are recorded, evenly spread over its input. A line has about six spans, and collectors
# cannot show a trace with hundreds of thousands of them.
MAX_LINES = 500
BROKEN = (BatchStatus.FAILED, BatchStatus.EXPIRED)


class SpanIds(RandomIdGenerator):  # type: ignore[misc]  # the SDK is optional, so mypy may not see it
    """Draws the ids of spans at random. A span whose id is known before, that of a batch, gets it from `next`."""

    def __init__(self) -> None:
        self.next: int | None = None  # the id of the next span; None: it is drawn

    def generate_span_id(self) -> int:
        known, self.next = self.next, None
        return super().generate_span_id() if known is None else known


class BatchSpans:
    """Records the spans of batches. Implements `gateway.jobs.batches.lines.line.BatchTracer`."""

    def __init__(self, tracer: Tracer, ids: SpanIds) -> None:
        """`ids` is the generator of ids that `tracer` was made with."""
        self._tracer = tracer
        self._ids = ids

    @contextmanager
    def line(self, batch: Batch, line: BatchLine) -> Iterator[RequestTrace]:
        parent = _context_of_batch(batch)
        if not is_sampled(parent) or not _is_chosen(batch, line):
            with _current(RequestTrace(parent[:-2] + NOT_SAMPLED)) as trace:
                yield trace
            return
        named = {"tidegate.batch.id": batch.id, "tidegate.batch.custom_id": line.custom_id}
        span = self._tracer.start_span(
            batch.endpoint, context_of(parent), attributes={**named, "tidegate.batch.line": line.number}
        )
        trace = RequestTrace(traceparent_of(span))
        try:
            with _current(trace):
                yield trace
        except asyncio.CancelledError:
            trace.note(error__type="stopped")  # the batch was cancelled, or its gateway ends
            raise
        finally:
            _end_line(span, trace)

    def end(self, batch: Batch) -> None:
        if not is_sampled(batch.traceparent or ""):
            return
        self._ids.next = _span_id(batch)
        span = self._tracer.start_span(
            f"batch {batch.model or batch.endpoint}",
            context_of(batch.traceparent or ""),
            attributes={
                "tidegate.batch.id": batch.id,
                "tidegate.batch.endpoint": batch.endpoint,
                "tidegate.batch.status": batch.status.value,
                "tidegate.batch.window": batch.completion_window,
                "tidegate.batch.lines": batch.total,
                "tidegate.batch.completed": batch.completed,
                "tidegate.batch.failed": batch.failed,
                # Not as gen_ai.usage.…: backends add these up over spans, and the spans of the lines have them.
                "tidegate.input_tokens": batch.input_tokens,
                "tidegate.cached_tokens": batch.cached_tokens,
                "tidegate.output_tokens": batch.output_tokens,
            },
            start_time=_ns(batch.created_at),
        )
        for status in BatchStatus:
            at_s = None if status is BatchStatus.VALIDATING else getattr(batch, f"{status.value}_at")
            if at_s is not None:
                span.add_event(f"tidegate.batch.{status.value}", timestamp=_ns(at_s))
        if batch.status in BROKEN:
            fail(span, batch.status.value)
        span.end(_ns(getattr(batch, f"{batch.status.value}_at")))


def _end_line(span: Span, trace: RequestTrace) -> None:
    attributes = trace.attributes
    name_by_operation(span, attributes)
    status = attributes.get("http.response.status_code")
    if isinstance(status, int) and status >= FIRST_ERROR:
        fail(span, str(status))
    span.set_attributes(attributes)
    span.end()


@contextmanager
def _current(trace: RequestTrace) -> Iterator[RequestTrace]:
    token = CURRENT_TRACE.set(trace)
    try:
        yield trace
    finally:
        CURRENT_TRACE.reset(token)


def _is_chosen(batch: Batch, line: BatchLine) -> bool:
    return (line.number - 1) % max(1, math.ceil(batch.total / MAX_LINES)) == 0


def _span_id(batch: Batch) -> int:
    """Return the id of the batch's span, which is never 0."""
    return int.from_bytes(hashlib.sha256(batch.id.encode()).digest()[:8]) or 1


def _context_of_batch(batch: Batch) -> str:
    """Return the trace context of the batch's own span. It is in the trace of the request that created the batch."""
    version, trace_id, _, flags = (batch.traceparent or "").split("-")
    return f"{version}-{trace_id}-{_span_id(batch):016x}-{flags}"


def _ns(unix_s: int) -> int:
    return unix_s * 10**9
