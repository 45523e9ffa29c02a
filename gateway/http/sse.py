"""Server-sent events as OpenAI's clients read them: `data: <one line of JSON>\\n\\n`, comments as keep-alive.

Knows frames and ASGI; does not know what they say. Not sse-starlette: that ends every stream half a second
after SIGTERM where this server drains, patches uvicorn at import, formats each event through StringIO and a
regular expression, and starts a ping and a watcher task for each stream. What is needed here is smaller.

Headers travel with the first frame, so that whatever fails before it is still a plain HTTP error.
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
SEND_TIMEOUT_S = 60.0  # for a client to take anything of what was sent: one that reads nothing is gone

Write = Callable[[bytes], Awaitable[None]]


def error_frame(error: ApiError) -> bytes:
    """How a stream says that it broke; no `[DONE]` follows."""
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


class EventStreamResponse(Response):
    """Runs `produce(write)` while the client stays. `write` takes whole frames, one or several at once.

    An `ApiError` before the first write is left to the application's handlers; later, it becomes a frame.
    `on_disconnect` is called when the client hung up first, or took nothing for `send_timeout_s`; `produce` has
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
            except OSError:  # ASGI 2.4's word for a closed connection; the timeout's error is one too
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
        except Exception as error:  # too late for the middleware: the answer has begun
            if not self._started or isinstance(error, ClientDisconnected):
                raise
            log.exception("stream_failed")
            await write(error_frame(internal_error()))
