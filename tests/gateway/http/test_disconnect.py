"""A client that hangs up ends the work for it, and streams to clients that are gone end."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Scope

from gateway.http.disconnect import ClientDisconnected, until_disconnect
from gateway.http.sse import EventStreamResponse, Write
from gateway.protocol.errors import ApiError


class Connection:
    """The receive and send functions of an ASGI request, controlled by a test."""

    def __init__(self, *, closed_to_sends: bool = False, reads: bool = True) -> None:
        self.sent: list[Message] = []
        self.hung_up = asyncio.Event()
        self._closed_to_sends = closed_to_sends
        self._reads = reads

    async def receive(self) -> Message:
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._closed_to_sends:
            raise OSError("closed")
        if not self._reads:
            await asyncio.Event().wait()
        self.sent.append(message)


async def test_a_hang_up_cancels_the_block_and_lets_it_clean_up() -> None:
    connection, cleaned = Connection(), False
    with pytest.raises(ClientDisconnected):
        async with until_disconnect(connection.receive):
            connection.hung_up.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned = True
    assert cleaned


async def test_other_cancellations_and_timeouts_stay_what_they_are() -> None:
    with pytest.raises(TimeoutError):
        async with until_disconnect(Connection().receive):
            raise TimeoutError
    waiting = asyncio.Event()

    async def work() -> None:
        async with until_disconnect(Connection().receive):
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def respond(connection: Connection, produce: Any, send_timeout_s: float = 60) -> list[str]:
    gone: list[str] = []
    response = EventStreamResponse(produce, lambda: gone.append("gone"), send_timeout_s)
    scope: Scope = {"type": "http", "path": "/", "headers": []}
    await response(scope, connection.receive, connection.send)
    return gone


async def test_a_stream_starts_with_its_first_frame() -> None:
    connection = Connection()

    async def produce(write: Write) -> None:
        assert connection.sent == []
        await write(b"data: 1\n\n")

    assert await respond(connection, produce) == []
    assert [m["type"] for m in connection.sent] == ["http.response.start"] + 2 * ["http.response.body"]
    assert [m.get("more_body") for m in connection.sent] == [None, True, False]


async def test_a_send_to_a_closed_connection_is_a_hang_up() -> None:
    async def produce(write: Write) -> None:
        await write(b"data: 1\n\n")

    assert await respond(Connection(closed_to_sends=True), produce) == ["gone"]


async def test_a_reader_that_stops_reading_is_a_hang_up() -> None:
    ended = False

    async def produce(write: Write) -> None:
        nonlocal ended
        try:
            await write(b"data: 1\n\n")
        finally:
            ended = True

    assert await respond(Connection(reads=False), produce, send_timeout_s=0.01) == ["gone"]
    assert ended


@pytest.mark.parametrize("error", [ApiError(503, "later", "server_error"), RuntimeError("secret")])
async def test_after_the_first_frame_errors_are_frames(error: Exception) -> None:
    async def produce(write: Write) -> None:
        await write(b"data: 1\n\n")
        raise error

    connection = Connection()
    assert await respond(connection, produce) == []
    frame = connection.sent[2]["body"]
    assert frame.startswith(b'data: {"error":{"message":"') and frame.endswith(b"}}\n\n")
    assert b"secret" not in frame
