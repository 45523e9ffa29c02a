"""Server-sent events as OpenAI's clients read them: `data: <one line of JSON>\\n\\n`, and comments as keep-alive.

Knows frames and ASGI; does not know what the frames say.

The response's headers go out with its first frame, so that a failure before it is still a plain HTTP error with its
own status. sse-starlette (3.7) sends the headers before it asks for the first event. It also runs three or four tasks
for each stream (events, pings, shutdown, disconnect), where this module runs one besides the request's own, and it
pings by time alone, not by silence. The slow feed of /admin uses it (gateway/routes/sla_feed.py).
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.disconnect import ClientDisconnected, until_disconnect
from gateway.protocol.errors import ApiError, internal_error

log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
SEND_TIMEOUT_S = 60.0  # seconds for a client to take one write; a client that takes nothing counts as gone

Write = Callable[[bytes], Awaitable[None]]


def error_frame(error: ApiError) -> bytes:
    """Return the last frame of a stream that failed. No `[DONE]` follows it."""
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


class EventStreamResponse(Response):
    """Runs `produce(write)` while the client is connected. `write` takes one or more whole frames.

    An exception before the first write is left to the application's handlers; a later one becomes an error frame.
    `on_disconnect` is called if the client hangs up early, or takes nothing for `send_timeout_s`. `produce` has
    been cancelled and has ended by then.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Write], Awaitable[None]],
        on_disconnect: Callable[[], None],
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
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
                await self._guarded(write)
                await write(b"", more=False)
        except ClientDisconnected:
            self._on_disconnect()

    async def _guarded(self, write: Write) -> None:
        try:
            await self._produce(write)
        except ApiError as error:
            if not self._started:
                raise
            await write(error_frame(error))
        except Exception as error:  # the middleware cannot answer any more: the headers are out
            if not self._started or isinstance(error, ClientDisconnected):
                raise
            log.exception("stream_failed")
            await write(error_frame(internal_error()))
