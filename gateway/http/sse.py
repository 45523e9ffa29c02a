"""Server-sent events in the format of OpenAI's clients: `data: <one line of JSON>\\n\\n`, and comments as keep-alive.

Knows frames and ASGI; does not know the content of the frames.

The headers of a response are sent together with its first frame. A failure before the first frame can therefore still
be answered with a plain HTTP error that has its own status.

Token streams do not use sse-starlette (3.7), for three reasons. First, it sends the headers before it asks for the
first event. Second, it runs three or four tasks for each stream (events, pings, shutdown, disconnect), while this
module runs only one task in addition to the task of the request. Third, it sends pings at fixed intervals, not after a
silence. Only the slow feed of /admin uses sse-starlette (gateway/routes/operators/sla_feed.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.disconnect import ClientDisconnected, until_disconnect
from gateway.protocol.error_shapes import error_body, speaks_anthropic
from gateway.protocol.errors import ApiError, internal_error, store_failed
from scheduler.store.errors import STORE_AWAY

log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
SEND_TIMEOUT_S = 60.0  # seconds in which a client must accept one write; otherwise it counts as disconnected

Write = Callable[[bytes], Awaitable[None]]


def error_frame(error: ApiError, scope: Scope) -> bytes:
    """Return the last frame of a stream that fails. The stream sends no `[DONE]` after this frame."""
    name = b"event: error\n" if speaks_anthropic(scope) else b""
    return name + b"data: " + msgspec.json.encode(error_body(error, scope)) + b"\n\n"


class EventStreamResponse(Response):
    """A streaming response: runs `produce(write)` while the client is connected.

    Each call of `write` sends one or more whole frames. An exception before the first write is left to the error
    handlers of the application. A later exception is sent as an error frame. `on_disconnect` is called if the client
    hangs up early, or accepts nothing for `send_timeout_s` seconds. Before that call, `produce` is cancelled and has
    ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Write], Awaitable[None]],
        on_disconnect: Callable[[], None],
        send_timeout_s: float = SEND_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._produce = produce
        self._on_disconnect = on_disconnect
        self._send_timeout_s = send_timeout_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(frames: bytes, more: bool = True) -> None:
            try:
                async with asyncio.timeout(self._send_timeout_s):
                    if not self._started:
                        self._started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send({"type": "http.response.body", "body": frames, "more_body": more})
            except OSError:  # ASGI 2.4's error for a closed connection; the timeout's TimeoutError is an OSError too
                raise ClientDisconnected from None

        try:
            async with until_disconnect(receive):
                await self._guarded(write, scope)
                await write(b"", more=False)
        except ClientDisconnected:
            self._on_disconnect()

    async def _guarded(self, write: Write, scope: Scope) -> None:
        try:
            await self._produce(write)
        except Exception as error:
            if not self._started or isinstance(error, ClientDisconnected):
                raise
            if isinstance(error, STORE_AWAY):
                error = store_failed(error)
            if not isinstance(error, ApiError):  # the middleware cannot answer it, because the headers have been sent
                log.exception("stream_failed")
                error = internal_error()
            await write(error_frame(error, scope))
