"""The gateway's spans: one for each request that generates something, and under it preparation and output.

Requests that create batches or tasks have one, too: what is generated for them later is recorded under it.
"""

from http import HTTPMethod
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.trace import CURRENT_TRACE, RequestTrace
from tidegate.tracing.spans import FIRST_ERROR, PROPAGATOR, add_child, fail, name_by_operation, traceparent_of

# Endpoints whose requests are traced. All others answer from memory or the store.
GENERATING_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
TRACED_PATHS = GENERATING_PATHS | {"/v1/batches", "/v1/tasks"}


class TracedRequests:
    """The ASGI middleware that puts a span around a request. It goes on with the client's trace, if there is one."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_traced = scope["type"] == "http" and scope["method"] == HTTPMethod.POST and scope["path"] in TRACED_PATHS
        if not is_traced:
            await self._app(scope, receive, send)
            return
        span = self._tracer.start_span(
            f"POST {scope['path']}",
            context=_parent(scope),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": scope["path"], "url.path": scope["path"]},
        )
        trace = RequestTrace(traceparent_of(span))
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = CURRENT_TRACE.set(trace)
        try:
            await self._app(scope, receive, watched)
        finally:
            CURRENT_TRACE.reset(token)
            self._end(span, trace, scope, status)

    def _end(self, span: Span, trace: RequestTrace, scope: Scope, status: int) -> None:
        if not span.is_recording():
            return
        state: dict[str, Any] = scope.get("state", {})
        span.set_attributes(trace.attributes)
        span.set_attribute("tidegate.request_id", state.get("request_id", ""))
        if state.get("hung_up"):
            span.set_attribute("tidegate.client_hung_up", True)
        name_by_operation(span, trace.attributes)
        if status:
            span.set_attribute("http.response.status_code", status)
        if status >= FIRST_ERROR or not status:
            fail(span, str(status or "disconnected"))
        began_ns: int = span.start_time  # the spans of the SDK have it
        if scope["path"] in GENERATING_PATHS:
            add_child(self._tracer, span, "tidegate.prepare", began_ns, trace.submitted_ns)
        if trace.first_token_ns is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", (trace.first_token_ns - began_ns) / 1e9)
            add_child(self._tracer, span, "tidegate.output", trace.first_token_ns, None)
        span.end()


def _parent(scope: Scope) -> Context:
    """Return the trace of the client, if its headers name one."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return PROPAGATOR.extract(headers, context=Context())
