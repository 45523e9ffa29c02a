"""The HTTP protocol of one connection: uvicorn's, with limits on time and size, and without chunks for HTTP/1.0.

Knows HTTP's format and uvicorn's protocol on httptools (as of 0.54), which has no limits of its own: it waits for ever
for headers and bodies, and collects headers of any size. Which connections are too many or too slow is decided in
gateway/http/connections.py.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import msgspec
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.http.connections import Closed, ConnectionTable
from gateway.protocol.errors import ApiError, invalid_request, retry_after

MESSAGES = {
    Closed.SLOW_HEADERS: ApiError(408, "The request's headers took too long.", "timeout", code="timeout"),
    Closed.SLOW_BODY: ApiError(408, "The request's body took too long.", "timeout", code="timeout"),
    Closed.LARGE_HEADERS: ApiError(431, "The request line and headers are too large.", code="headers_too_large"),
    Closed.TOO_MANY: ApiError(
        503, "Too many connections are open.", "server_error", code="server_overloaded", headers=retry_after(1.0)
    ),
}


MAX_PIPELINED = 16  # requests that wait for the answer to an earlier one of their connection; no known client sends any


class _Receiving(Enum):
    """The part of a request that the client sends next."""

    NOTHING = auto()  # the connection is idle
    HEADERS = auto()
    BODY = auto()
    NO_MORE = auto()  # the request is complete, and its answer is not


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, table: ConnectionTable, **settings: Any) -> None:
        super().__init__(**settings)
        self.address = ""
        self._table = table
        self._receiving = _Receiving.NOTHING
        self._num_unparsed = 0  # bytes in a row that were no part of a body and completed no headers
        self._num_body_bytes = 0  # of the data that is being parsed
        self._has_advanced = False

    # -- what asyncio calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._table.admit(self):
            self.give_up(Closed.TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse `data` in pieces, so that the parser never collects more of the headers than their limit."""
        limit = self._table.limits.max_header_bytes
        self._num_body_bytes = begin = 0
        while begin < len(data) and not self.transport.is_closing():
            end = begin + limit - self._num_unparsed
            if begin == end:
                self.give_up(Closed.LARGE_HEADERS)
                return
            self._parse(data if begin == 0 and end >= len(data) else data[begin:end])
            begin = end
        if not self.transport.is_closing():
            self._note_receiving()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._table.await_reader(self)

    # -- what the parser and the answer call ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._receiving = _Receiving.HEADERS
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._receiving = _Receiving.BODY
        self._has_advanced = True
        if len(self.pipeline) >= MAX_PIPELINED:  # all of them are parsed at once, and would hold up other connections
            raise ValueError("too many requests at once")
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope["http_version"] == "1.0":
            self.cycle.__class__ = _Http10Cycle  # its task has not begun yet

    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving = _Receiving.NO_MORE
        self._has_advanced = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._table.await_reader(self)
        if self._receiving is _Receiving.BODY:
            self._table.await_rest(self)
        elif self._receiving is _Receiving.NO_MORE and not self.pipeline:
            self._receiving = _Receiving.NOTHING
            self._table.await_request(self)

    # -- what the table calls ------------------------------------------------------------------------------------------

    @property
    def is_read_paused(self) -> bool:
        return self.flow.read_paused

    @property
    def num_unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def give_up(self, reason: Closed) -> None:
        self._table.note(reason, self.address)
        error = MESSAGES.get(reason)
        if error is not None and (reason is Closed.TOO_MANY or self._awaits_answer()):
            self._send_error(error)
        else:
            self._close()

    def abort(self) -> None:
        self.transport.abort()

    # ------------------------------------------------------------------------------------------------------------------

    def _awaits_answer(self) -> bool:
        """Whether the client has begun a request, and nothing of its answer has been sent."""
        if self._receiving is _Receiving.BODY:
            return not self.cycle.response_started
        return self._receiving is _Receiving.HEADERS and (self.cycle is None or self.cycle.response_complete)

    def send_400_response(self, msg: str) -> None:
        """Answer data that the parser refused. uvicorn calls this."""
        if self.cycle is None or self.cycle.response_complete:
            self._send_error(invalid_request(msg, code="invalid_http"))
        else:
            self._close()

    def _parse(self, data: bytes) -> None:
        self._has_advanced = False
        super().data_received(data)
        self._num_unparsed = 0 if self._has_advanced else self._num_unparsed + len(data)

    def _note_receiving(self) -> None:
        is_answered = self.cycle is not None and self.cycle.response_complete
        if self._receiving is _Receiving.NO_MORE and is_answered and not self.pipeline:
            self.on_response_complete()  # uvicorn called it before the rest of the body came, and then lost its timer
        elif self._receiving is _Receiving.NO_MORE:
            self._table.clear(self)
        elif self._receiving is _Receiving.BODY and not is_answered:
            self._table.await_body(self, self._num_body_bytes)
        elif self._receiving is not _Receiving.BODY and self._num_unparsed:
            self._table.await_headers(self)

    def _send_error(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        head = b"".join(f"{name}: {value}\r\n".encode() for name, value in (headers | error.headers).items())
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self._close()

    def _close(self) -> None:
        self._table.clear(self)
        self._table.await_reader(self)
        self.transport.close()


class _Http10Cycle(RequestResponseCycle):
    """A request of HTTP/1.0 and its answer. Its clients cannot read chunks: the end of the connection is the end.

    uvicorn sends chunks to every client if the length of the answer is unknown, as that of a stream.
    """

    ends_with_connection = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", [])):
                self.ends_with_connection = True
                self.chunked_encoding = False
        elif self.ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))  # type: ignore[arg-type]
        await super().send(message)


def protocol_factory(table: ConnectionTable) -> Callable[..., asyncio.Protocol]:
    """Return what uvicorn calls for each new connection."""

    def create(**settings: Any) -> asyncio.Protocol:
        return HttpProtocol(table, **settings)

    return create
