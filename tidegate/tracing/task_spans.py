"""The spans of tasks and of the calls of the static endpoint that they are in.

A call has tasks of several clients, but one parent. It goes on with the trace of its first traced task, and is linked
to the others.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import Link, Span, SpanKind, Tracer, get_current_span

from scheduler.drivers.calls.results import CallTrace
from scheduler.request import is_sampled
from scheduler.tasks.task import EndedTask, Task, TaskState
from tidegate.tracing.spans import add_child, context_of, fail, traceparent_of


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call whose span is open. Implements `scheduler.drivers.calls.results.CallTrace`."""

    span: Span | None  # None: no task of it is sampled
    traceparent: str
    began_ns: int

    def end(self, outcome: str) -> None:
        if self.span is None:
            return
        self.span.set_attribute("tidegate.call.outcome", outcome)
        if outcome != "ok":
            fail(self.span, outcome)
        self.span.end()


class TaskSpans:
    """Records the spans of a worker's tasks. Implements `scheduler.drivers.calls.results.TaskTracer`."""

    def __init__(self, tracer: Tracer, worker_id: str, endpoint: str) -> None:
        """`endpoint` is the name of the endpoint."""
        self._tracer = tracer
        self._worker_id = worker_id
        self._endpoint = endpoint

    def begin_call(self, tasks: Sequence[Task], batch: int) -> TracedCall:
        now_ns = time.time_ns()
        sampled = dict.fromkeys(task.traceparent for task in tasks if is_sampled(task.traceparent))
        if not sampled:
            return TracedCall(None, tasks[0].traceparent, now_ns)
        parent, *others = map(context_of, sampled)
        span = self._tracer.start_span(
            "tidegate.call",
            parent,
            SpanKind.CLIENT,
            {
                "tidegate.worker": self._worker_id,
                "tidegate.endpoint": self._endpoint,
                "tidegate.call.items": len(tasks),
                "tidegate.call.places": batch,
            },
            links=[Link(get_current_span(other).get_span_context()) for other in others],
            start_time=now_ns,
        )
        return TracedCall(span, traceparent_of(span), now_ns)

    def record(self, ended: EndedTask, call: CallTrace | None) -> None:
        task = ended.task
        if not is_sampled(task.traceparent):
            return
        assert call is None or isinstance(call, TracedCall)
        arrival_ns, now_ns = task.arrival_ms * 10**6, time.time_ns()
        links = [Link(call.span.get_span_context())] if call is not None and call.span is not None else []
        span = self._tracer.start_span(
            "tidegate.task",
            context_of(task.traceparent),
            attributes={
                "tidegate.task.id": task.id,
                "tidegate.tier": task.tier,
                "tidegate.worker": self._worker_id,
                "tidegate.status": ended.state.value,
                "tidegate.attempts": ended.claimed.attempt,
                "tidegate.failures": len(task.failures),
            },
            links=links,
            start_time=arrival_ns,
        )
        if ended.state is TaskState.DEAD:
            fail(span, "dead")
        began_ns = now_ns if call is None else call.began_ns
        add_child(self._tracer, span, "tidegate.queue", arrival_ns, began_ns)
        span.end(now_ns)
