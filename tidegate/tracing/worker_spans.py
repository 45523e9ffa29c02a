"""The spans of a request on its worker: queue, prefill, decode, and the pauses in them.

They are made when the request has ended: all times are known by then, so nothing is done while the engine works.
"""

import time
from collections.abc import Callable

from opentelemetry.trace import Span, Tracer

from scheduler.request_state import RequestState, Status
from tidegate.tracing.spans import add_child, context_of, fail

# Pauses that have a span of their own. Bulk beside busy chat may pause thousands of times; their number and their sum
# are attributes.
MAX_PAUSES = 100

ToNs = Callable[[float], int]  # from seconds of the worker's clock to ns of Unix time


class WorkerSpans:
    """Records the spans of a worker's requests. Implements `scheduler.worker.request_intake.RequestTracer`."""

    def __init__(self, tracer: Tracer, worker_id: str) -> None:
        self._tracer = tracer
        self._worker_id = worker_id

    def record(self, state: RequestState, now: float) -> None:
        """Record what an ended request waited for and what was done for it, unless its trace is not sampled.

        A cancelled request has ended `now`.
        """
        wall_ns = time.time_ns()

        def to_ns(at_s: float) -> int:
            return wall_ns - int((now - at_s) * 1e9)

        ended_s = now if state.ended_s is None else state.ended_s
        parent = context_of(state.request.traceparent)
        root = self._tracer.start_span("tidegate.request", parent, start_time=to_ns(state.arrived_s))
        if root.is_recording():
            _describe(root, state, self._worker_id)
            _add_events(root, state, to_ns)
            _add_phases(self._tracer, root, state, ended_s, to_ns)
        root.end(to_ns(ended_s))


def _describe(root: Span, state: RequestState, worker_id: str) -> None:
    request, first_s = state.request, state.first_token_s
    root.set_attributes(
        {
            # Not as gen_ai.usage.…: backends add these up over spans, and the gateway's span has them.
            "tidegate.input_tokens": len(request.prompt_token_ids),
            "tidegate.cached_tokens": state.num_cached_tokens or 0,
            "tidegate.output_tokens": len(state.output_token_ids),
            "tidegate.sequence_id": request.id,
            "tidegate.tier": request.tier,
            "tidegate.worker": worker_id,
            "tidegate.attempt": state.attempt,
            "tidegate.restored_tokens": state.num_restored,
            "tidegate.status": state.status.value,
            "tidegate.pauses": state.num_stops,
            "tidegate.paused_s": state.paused_s,
            "tidegate.preemptions": state.num_preemptions,
            "tidegate.suspensions": state.num_suspensions,
            "tidegate.met_slo": state.status is Status.FINISHED and state.met_slo(),
        }
    )
    if first_s is not None:
        root.set_attribute("gen_ai.server.time_to_first_token", first_s - state.arrived_s)
    if state.status is Status.FAILED:
        fail(root, "failed")


def _add_events(root: Span, state: RequestState, to_ns: ToNs) -> None:
    root.add_event("tidegate.claimed", timestamp=to_ns(state.claimed_s))
    for at_s in state.marks.suspensions_s if state.marks is not None else ():
        root.add_event("tidegate.suspended", timestamp=to_ns(at_s))


def _add_phases(tracer: Tracer, root: Span, state: RequestState, ended_s: float, to_ns: ToNs) -> None:
    """Add a child for each phase that the request has reached, and for each pause under the phase that it was in."""
    pauses = _pauses(state, ended_s)[:MAX_PAUSES]
    for name, began_s, until_s in _phases(state, ended_s):
        phase = add_child(tracer, root, name, to_ns(began_s), to_ns(until_s))
        for pause_s, resumed_s, mode in pauses:
            if began_s <= pause_s < until_s:
                preempted = {"tidegate.preemption_mode": mode}
                add_child(tracer, phase, "tidegate.pause", to_ns(pause_s), to_ns(resumed_s), preempted)


def _pauses(state: RequestState, ended_s: float) -> list[tuple[float, float, str]]:
    """Return the begin, the end and the mode of each preemption. One may have lasted to the end."""
    if state.marks is None:
        return []
    last = [] if state.stopped_s is None else [(state.stopped_s, ended_s, state.marks.stop_mode)]
    return [*state.marks.pauses, *last]


def _phases(state: RequestState, ended_s: float) -> list[tuple[str, float, float]]:
    """Return the phases with their begins and ends."""
    started_s, first_s = state.first_scheduled_s, state.first_token_s
    phases = [("tidegate.queue", state.arrived_s, ended_s if started_s is None else started_s)]
    if started_s is not None:
        phases.append(("tidegate.prefill", started_s, ended_s if first_s is None else first_s))
    if first_s is not None:
        phases.append(("tidegate.decode", first_s, ended_s))
    return phases
