"""However many parts a connection has sent, it parses few of them before the event loop does what else is due."""

import asyncio
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from gateway.http.server.connection import PARTS_PER_TURN, PIECE_BYTES, HttpProtocol, server_config
from gateway.http.server.connections import ConnectionLimits, ConnectionTable

HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
TINY = b"1\r\na\r\n"  # a chunk of one byte
MOST_PARTS = PARTS_PER_TURN + PIECE_BYTES // len(TINY) + 1  # in one turn: the last piece may begin just below the bound


class Transport(asyncio.Transport):
    """A transport that notes what is done to it. Its client has sent more if it is read."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.is_reading_now = True
        self.closed = False
        self.written = b""

    def pause_reading(self) -> None:
        self.is_reading_now = False

    def resume_reading(self) -> None:
        self.is_reading_now = True

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


class App:
    """An application that reads bodies, and answers at once or at the body's end."""

    def __init__(self, answers_at_once: bool) -> None:
        self.answers_at_once = answers_at_once
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", not self.answers_at_once
        while more:
            message = await receive()
            body, more = body + message.get("body", b"disconnected"), message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


class Parts:
    """Counts the calls of a connection's parser."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[HttpProtocol] = []
        on_body = HttpProtocol.on_body

        def counted(protocol: HttpProtocol, body: bytes) -> None:
            self.calls.append(protocol)
            on_body(protocol, body)

        monkeypatch.setattr(HttpProtocol, "on_body", counted)

    def taken(self) -> list[HttpProtocol]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


def connections(app: App, number: int) -> list[tuple[HttpProtocol, Transport]]:
    """Return connections of one server, which are open."""
    table = ConnectionTable(ConnectionLimits(), count_closed=lambda reason: None)
    config: uvicorn.Config = server_config(FastAPI(), table)
    config.load()
    config.loaded_app = app
    opened = []
    for _ in range(number):
        create: Any = config.http_protocol_class
        protocol, transport = create(config=config, server_state=ServerState(), app_state={}), Transport()
        protocol.connection_made(transport)
        opened.append((protocol, transport))
    return opened


@pytest.mark.parametrize("answers_at_once", [False, True])
async def test_a_body_of_tiny_chunks_is_parsed_in_many_turns(
    answers_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, parts, number = App(answers_at_once), Parts(monkeypatch), 40_000
    ((protocol, transport),) = connections(app, 1)
    protocol.data_received(HEAD + TINY * number + b"0\r\n\r\n")
    turns, found = 0, len(parts.calls)
    while found < number:
        assert 0 < len(parts.taken()) <= MOST_PARTS
        assert not transport.is_reading_now  # though the application reads on
        await asyncio.sleep(0)
        turns, found = turns + 1, found + len(parts.calls)
    assert turns > number // MOST_PARTS
    while not (transport.written and transport.is_reading_now):
        await asyncio.sleep(0)
    assert app.bodies == [b"" if answers_at_once else b"a" * number]
    assert transport.written.startswith(b"HTTP/1.1 204") and not transport.closed
    assert protocol.timeout_keep_alive_task is not None, "it is closed some time after its last request"
    protocol.connection_lost(None)


async def test_connections_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    opened = connections(App(answers_at_once=True), 3)
    for protocol, _ in opened:
        protocol.data_received(HEAD + TINY * 10_000)
    order = []
    for _ in range(6):
        parts.taken()
        await asyncio.sleep(0)
        order.append(set(parts.calls))
    assert order == [{protocol} for protocol, _ in opened] * 2
    for protocol, _ in opened:
        protocol.connection_lost(None)


async def test_bytes_that_come_while_others_wait_are_parsed_after_them() -> None:
    app = App(answers_at_once=False)
    ((protocol, transport),) = connections(app, 1)
    whole = HEAD + TINY * 3000 + b"2\r\nbc\r\n0\r\n\r\n"
    for begin in range(0, len(whole), 6000):
        protocol.data_received(whole[begin : begin + 6000])
    while not app.bodies:
        await asyncio.sleep(0)
    assert app.bodies == [b"a" * 3000 + b"bc"]
    protocol.connection_lost(None)


async def test_a_lost_connection_ends_its_answer_though_it_has_sent_more_requests() -> None:
    app = App(answers_at_once=False)
    ((protocol, transport),) = connections(app, 1)
    protocol.data_received((HEAD + TINY + b"0\r\n\r\n") * 3)  # the first one's task has not begun
    protocol.connection_lost(None)
    while not app.bodies:
        await asyncio.sleep(0)
    assert app.bodies == [b"disconnected"] and transport.written == b""


async def test_a_lost_connection_parses_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    ((protocol, transport),) = connections(App(answers_at_once=True), 1)
    protocol.data_received(HEAD + TINY * 10_000)
    transport.close()
    protocol.connection_lost(None)
    parts.taken()
    for _ in range(3):
        await asyncio.sleep(0)
    assert parts.calls == []
