"""The HTTP protocol of one connection: uvicorn's, with limits on time and size, and without chunks for HTTP/1.0.

Knows HTTP's format and uvicorn's protocol on httptools (as of 0.54), which has no limits of its own: it waits for ever
for headers and bodies, collects headers of any size, and parses all that has come in one go. Which connections are too
many or too slow is decided in gateway/http/server/connections.py.
"""

import asyncio
from enum import Enum, auto
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.http.server.connections import Closed, ConnectionTable
from gateway.http.server.tls import Certificate, secured
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

# Each part that the parser finds (a header, a chunk) is a call in Python, and a chunk may have one byte. A connection
# parses pieces of so many bytes until it has found so many parts; then the event loop does what else is due. A turn has
# at most about a thousand parts, which take 1 to 2 ms.
PIECE_BYTES = 4096
PARTS_PER_TURN = 256


class _Receiving(Enum):
    """The part of a request that the client sends next."""

    NOTHING = auto()  # the connection is idle
    HEADERS = auto()
    BODY = auto()
    NO_MORE = auto()  # the request is complete, and its answer is not


class _Flow(FlowControl):
    """uvicorn's flow control, which also reads nothing while a connection holds bytes that wait to be parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_wanted = True  # whether uvicorn wants more
        self._is_held = False

    def pause_reading(self) -> None:
        self._is_wanted = False
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_wanted = True
        if not self._is_held:
            super().resume_reading()

    def hold(self) -> None:
        self._is_held = True
        super().pause_reading()

    def release(self) -> None:
        self._is_held = False
        if self._is_wanted:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    flow: _Flow

    def __init__(self, table: ConnectionTable, **settings: Any) -> None:
        super().__init__(**settings)
        self.address = ""
        self._table = table
        self._receiving = _Receiving.NOTHING
        self._num_unparsed = 0  # bytes in a row that were no part of a body and completed no headers
        self._num_body_bytes = 0  # that were parsed in this turn
        self._num_parts = 0  # headers and pieces of bodies that were parsed in this turn
        self._has_advanced = False
        self._unparsed = memoryview(b"")  # bytes that wait for the next turn
        self._running: RequestResponseCycle | None = None  # the request that is being answered, or was answered last

    # -- what asyncio calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self.address = self.client[0] if self.client else ""
        if not self._table.admit(self):
            self.give_up(Closed.TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.forget(self)
        self._unparsed = memoryview(b"")
        if self._running is not None and not self._running.response_complete:  # uvicorn marks only the last request
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._unparsed:
            self._unparsed = memoryview(bytes(self._unparsed) + data)  # the transport was still reading
        else:
            self._unparsed = memoryview(data)
            self.parse_more()

    def parse_more(self) -> None:
        """Parse what has come, as much as fits into one turn. Hold the rest, and read nothing more meanwhile."""
        self._num_body_bytes = self._num_parts = 0
        while self._unparsed and self._num_parts <= PARTS_PER_TURN and not self.transport.is_closing():
            self._parse_piece()
        if self.transport.is_closing():
            return
        self._note_wait()
        if self._unparsed:
            self.flow.hold()
            self._table.await_turn(self)
        else:
            self.flow.release()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._table.await_reader(self)

    # -- what the parser and the answer call ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._receiving = _Receiving.HEADERS
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_parts += 1
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._receiving = _Receiving.BODY
        self._table.clear(self)  # the body has its own time
        self._has_advanced = True
        if len(self.pipeline) >= MAX_PIPELINED:  # all of them are parsed at once, and would hold up other connections
            raise ValueError("too many requests at once")
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope["http_version"] == "1.0":
            self.cycle.__class__ = _Http10Cycle  # its task has not begun yet

    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        self._num_parts += 1
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
        self._note_wait()

    # -- what the table calls ------------------------------------------------------------------------------------------

    @property
    def is_sending_body(self) -> bool:
        return self._receiving is _Receiving.BODY

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

    def _parse_piece(self) -> None:
        """Parse the next bytes, but never so many that the parser collects more of the headers than their limit."""
        size = min(PIECE_BYTES, self._table.limits.max_header_bytes - self._num_unparsed)
        if size == 0:
            self.give_up(Closed.LARGE_HEADERS)
            return
        piece, self._unparsed = bytes(self._unparsed[:size]), self._unparsed[size:]
        self._has_advanced = False
        super().data_received(piece)
        self._num_unparsed = 0 if self._has_advanced else self._num_unparsed + len(piece)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: a request to upgrade is answered as if it were none, and any client may send many."""

    def _note_wait(self) -> None:
        """Tell the table what the server waits for. The rest of a body that is not needed extends no time limit."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._receiving is _Receiving.NO_MORE and is_answered and not self.pipeline:
            self._receiving = _Receiving.NOTHING
            self._table.await_request(self)
            if self.timeout_keep_alive_task is None:  # uvicorn ended it when the rest of an answered request came
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif self._receiving is _Receiving.NO_MORE:
            self._table.clear(self)
        elif self._receiving is _Receiving.BODY:
            self._table.await_more(self, 0 if is_answered else self._num_body_bytes)
        elif self._receiving is _Receiving.HEADERS or self._num_unparsed:
            self._table.await_more(self)

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


def server_config(
    app: FastAPI, table: ConnectionTable, certificate: Certificate | None = None, **settings: Any
) -> uvicorn.Config:
    """Return uvicorn's configuration for this protocol, with TLS if there is a certificate.

    `settings` are uvicorn's. It serves no websockets: a library for them may be installed, and its protocol would take
    over the connection without a word to `table`.
    """

    def create(**arguments: Any) -> HttpProtocol:
        return HttpProtocol(table, **arguments)

    http: Any = create if certificate is None else secured(create, certificate, table)
    return uvicorn.Config(app, http=http, ws="none", log_config=None, access_log=False, server_header=False, **settings)
