"""An HTTP/1.1 client for streams of tokens: one request on one connection, and hanging up is closing it.

It is made of an asyncio protocol and httptools, the parser that uvicorn brings, because a worker on the server's own
machine takes CPU time from it: a chunk costs a quarter of what it costs through httpx, and about what it costs through
aiohttp, which would be one more dependency (docs/engines.md). Knows bytes, connections and statuses; does not know what
a body says.
"""

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from engine.streaming import UpstreamLost, UpstreamUnreachable

CONNECT_TIMEOUT_S = 5.0
MAX_BUFFERED = 64  # pieces of a body; a reader that is further behind stops the connection until it has caught up


class BadUrl(ValueError):
    """The error of a URL that is not `http(s)://HOST[:PORT][/PREFIX]`."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is, and the key to send."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    api_key: str = ""

    @classmethod
    def parse(cls, url: str, api_key: str = "") -> "Address":
        """Return the address of a base URL, with or without `/v1` at its end. Raises `BadUrl`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BadUrl(f"{url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise BadUrl(f"{url}: expected http://HOST:PORT or https://HOST")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix, api_key)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.is_tls}://{host}:{self.port}{self.prefix}"

    def request(self, method: str, path: str, body: bytes = b"", traceparent: str = "") -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Connection: close",
            "Accept: */*",
        ]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if traceparent:
            lines.append(f"traceparent: {traceparent}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Exchange(asyncio.Protocol):
    """One request and its response on one connection. The callbacks `on_…` are httptools'."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._is_paused = False
        self._is_complete = False
        self._error: UpstreamLost | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}

    # -- for the caller ----------------------------------------------------------------------------------------

    async def wait_for_status(self) -> int:
        """Return the status when the headers are there. Raises `UpstreamLost`."""
        while self.status is None:
            await self._wait()
        return self.status

    async def read(self) -> bytes:
        """Return the next part of the body; nothing at its end. Raises `UpstreamLost` if the connection breaks off."""
        while not self._pieces:
            if self._is_complete:
                return b""
            await self._wait()
        data = b"".join(self._pieces)
        self._pieces.clear()
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self) -> bytes:
        body = b""
        while piece := await self.read():
            body += piece
        return body

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    # -- asyncio and httptools -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"The server's answer is not HTTP: {error}.")
            self.hang_up()
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        is_framed = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")
        if self.status is not None and not is_framed and exc is None:
            self._is_complete = True  # without a length, the body ends with the connection
        if not self._is_complete:
            self._fail(f"The connection to the server broke off: {exc or 'it was closed before the answer was whole'}.")
        self._changed.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        if len(self._pieces) >= MAX_BUFFERED and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_complete = True

    def _fail(self, message: str) -> None:
        if self._error is None:
            self._error = UpstreamLost(message)


class HttpSender:
    """Sends requests to one address."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._tls = ssl.create_default_context() if address.is_tls else None

    async def __call__(self, method: str, path: str, body: bytes = b"", traceparent: str = "") -> Exchange:
        """Connect and send a request. Raises `UpstreamUnreachable` if the server does not take the connection."""
        address, loop = self.address, asyncio.get_running_loop()
        request = address.request(method, path, body, traceparent)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, exchange = await loop.create_connection(
                    lambda: Exchange(request), address.host, address.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            raise UpstreamUnreachable(f"The server at {address} does not take connections: {reason}.") from error
        return exchange

    async def get(self, path: str, timeout_s: float = CONNECT_TIMEOUT_S) -> tuple[int, bytes]:
        """Return the status and the body of a GET. Raises `UpstreamLost`."""
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(timeout_s):
                exchange = await self("GET", path)
                return await exchange.wait_for_status(), await exchange.read_all()
        except TimeoutError:
            raise UpstreamUnreachable(f"The server at {self.address} does not answer {path} in time.") from None
        finally:
            if exchange is not None:
                exchange.hang_up()
