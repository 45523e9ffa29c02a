"""Middleware that gives every HTTP request an id, common headers, a log line, metrics and a size limit.

It is written in plain ASGI, so that the frames of a stream pass through without buffering. It does not look into
bodies, and logs no text of prompts or answers.
"""

import re
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.fairness import FairLock
from gateway.http.disconnect import CLIENT_CLOSED
from gateway.http.metrics import GatewayMetrics
from gateway.identity import Keyring, authorization_of
from gateway.protocol.error_handlers import error_response
from gateway.protocol.errors import internal_error, too_large
from scheduler.clock import Clock

log = structlog.get_logger(__name__)

ID_HEADERS = (b"x-request-id", b"request-id")  # the latter is Anthropic's name
COMMON_HEADERS = {
    b"openai-version": b"2020-10-01",  # the API version in the headers of OpenAI's own answers
    b"x-content-type-options": b"nosniff",  # no browser takes an uploaded file for a page
}
# Requested often, so logged at debug level.
QUIET_ROUTES = frozenset({"/health", "/ready", "/metrics", "/console/{name:path}"})


class OneAtATime:
    """The middleware that lets requests begin one after the other, however many come at once.

    Keys take turns, and so do the addresses of those without a key of `keyring`: many keys may share the address of one
    proxy.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring
        self._lock = FairLock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = self._keyring.find(authorization_of(Headers(scope=scope)))
            await self._lock.acquire((scope.get("client") or ("",))[0] if key is None else key.name)
        await self._app(scope, receive, send)


class RequestContext:
    """The middleware that gives each request an id and the common headers, and logs and counts finished requests.

    The id is in `request.state.request_id`, and `request.state.has_started` is true once the answer's head is sent. A
    route adds headers to its answer, whatever it will be, by `request.state.headers`.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, clock: Clock) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        began_s, status = self._clock.now(), CLIENT_CLOSED

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                scope["state"]["has_started"] = True
                passed_ms = round(1000 * (self._clock.now() - began_s))
                ours = dict.fromkeys(ID_HEADERS, request_id.encode()) | COMMON_HEADERS
                ours[b"openai-processing-ms"] = b"%d" % passed_ms
                theirs = [header for header in message.get("headers", ()) if header[0] not in ours]
                message["headers"] = theirs + list(ours.items())
                if beside := scope["state"].get("headers"):
                    MutableHeaders(scope=message).update(beside)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:  # the client hung up while it sent its body
            pass
        except Exception:  # a bug; only this handler turns unexpected exceptions into an answer
            log.exception("request_failed")
            if status == CLIENT_CLOSED:
                await error_response(internal_error(), scope)(scope, receive, send_with_headers)
        finally:
            if scope["state"].get("hung_up"):  # a stream has already sent status 200 when its client hangs up
                status = CLIENT_CLOSED
            self._finish(scope, status, self._clock.now() - began_s)

    def _finish(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        # Clients can invent methods, but the metrics must not get a new label value for each invented method.
        method = scope["method"] if route != "unmatched" else "-"
        self._metrics.observe_http(route, method, status, seconds)
        headers = Headers(scope=scope)
        client_id, retry_count = headers.get("x-client-request-id", ""), headers.get("x-stainless-retry-count", "")
        write = log.debug if route in QUIET_ROUTES else log.info
        write(
            "request",
            method=scope["method"],
            route=route,
            client=(scope.get("client") or ("",))[0],
            status=status,
            seconds=round(seconds, 4),
            client_request_id=client_id[:512] or None,
            retry_count=retry_count[:16] or None,
        )


class BodyLimit:
    """The middleware that refuses bodies of more than `max_bytes` bytes with status 413.

    A body is refused if its `content-length` is too large, or as soon as too many bytes have arrived. Paths whose
    beginning matches `exempt` have their own limits.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, exempt: re.Pattern[str]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._exempt = exempt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._exempt.match(scope["path"]):
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            await error_response(too_large(self._max_bytes), scope)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise too_large(self._max_bytes)
            return message

        await self._app(scope, counted, send)
