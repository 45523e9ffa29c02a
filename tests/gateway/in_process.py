"""An httpx transport that calls an ASGI app in this event loop. Answers stream, and closing one early is a hang-up."""

import asyncio
from collections.abc import AsyncIterator

import httpx
from starlette.types import ASGIApp, Message

LAST: Message = {"type": "http.request", "body": b"", "more_body": False}


class InProcess(httpx.AsyncBaseTransport):
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await _Exchange(self._app, request).answer()


class _Exchange(httpx.AsyncByteStream):
    """One request and its answer. Closing it waits until the app has ended."""

    def __init__(self, app: ASGIApp, request: httpx.Request) -> None:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        self._body = aiter(request.stream)
        self._is_head, self._has_body = request.method == "HEAD", True
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()  # what the app has sent; None: it has ended
        self._is_over = asyncio.Event()  # the answer is complete, or the client is gone
        self._running = asyncio.create_task(self._run(app, request))

    async def answer(self) -> httpx.Response:
        try:
            start = await self._sent.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if start is None:
            raise httpx.RemoteProtocolError("the app ended without an answer") from self._running.exception()
        return httpx.Response(start["status"], headers=start["headers"], stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._sent.get()) is not None:
            if body := message.get("body"):
                yield body
            if not message.get("more_body"):
                return
        raise httpx.RemoteProtocolError("the app ended in mid-answer")

    async def aclose(self) -> None:
        self._is_over.set()
        await asyncio.wait([self._running])

    async def _run(self, app: ASGIApp, request: httpx.Request) -> None:
        url = request.url
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.partition(b"?")[0],
            "query_string": url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("127.0.0.1", 50_000),
            "server": (url.host, url.port or 80),
            "state": {},
        }
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def _receive(self) -> Message:
        if self._has_body and not self._is_over.is_set():
            async for chunk in self._body:
                return {"type": "http.request", "body": chunk, "more_body": True}
            self._has_body = False
            return LAST
        await self._is_over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if not self._is_over.is_set():
            self._sent.put_nowait({**message, "body": b""} if self._is_head else message)
        if is_last:
            self._is_over.set()
