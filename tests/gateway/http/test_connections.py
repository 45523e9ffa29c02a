"""Connections that are too many, too slow or too large are closed, and keep nobody else out. Over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.http.server.connections import (
    Closed,
    ConnectionLimits,
    ConnectionTable,
)
from tests.gateway.stand import Bytes, Stand, serving_stand
from tests.gateway.tiny_model import MODEL
from tests.waiting import until

SOON = 0.2  # seconds; a timeout that a test waits for
LIMITS = ConnectionLimits(receive_timeout_s=60, send_timeout_s=60)
CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
HALF_OPEN = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HEALTH = HALF_OPEN + b"\r\n"


def post(body: bytes, length: int | None = None, path: str = "/v1/chat/completions") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


class Client:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, Any] | None]:
        """Return the status and the JSON body of one answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return int(head.split()[1]), msgspec.json.decode(await self.reader.readexactly(length))

    async def ask(self, data: bytes) -> int:
        await self.send(data)
        return (await self.answer())[0]

    async def is_closed(self) -> bool:
        """Wait for the end of the connection."""
        try:
            async with asyncio.timeout(30):
                return await self.reader.read() == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def connected(stand: Stand, source: str = "127.0.0.1") -> AsyncIterator[Client]:
    host, port = stand.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def many(stand: Stand, number: int, data: bytes, source: str = "127.0.0.1") -> AsyncIterator[Sequence[Client]]:
    """Open `number` connections that have all sent `data`, one after the other."""
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(number):
            clients.append(await stack.enter_async_context(connected(stand, source)))
            await clients[-1].send(data)
        yield clients


def closed(stand: Stand, reason: str) -> float:
    return stand.metric("tidegate_connections_closed_total", reason=reason)


@pytest.mark.parametrize("data", [b"", b"GET", HALF_OPEN, b"\r\n", b"GET / HTTP/1.0\r\n", HEALTH + HALF_OPEN])
async def test_headers_must_come_in_time(data: bytes) -> None:
    async with serving_stand(limits=replace(LIMITS, receive_timeout_s=SOON)) as stand, connected(stand) as client:
        await client.send(data)
        if data.startswith(HEALTH):
            assert (await client.answer())[0] == 200
        if data.startswith(b"GET"):
            status, body = await client.answer()
            assert (status, body and body["error"]["code"]) == (408, "timeout")
        assert await client.is_closed()
        assert closed(stand, "slow_headers") == 1


async def test_headers_byte_by_byte_do_not_gain_time() -> None:
    async with serving_stand(limits=replace(LIMITS, receive_timeout_s=SOON)) as stand, connected(stand) as client:
        await client.send(HALF_OPEN + b"X-Slow: ")

        async def trickle() -> None:
            while closed(stand, "slow_headers") == 0:
                await client.send(b"a")
                await asyncio.sleep(SOON / 20)

        async with asyncio.timeout(30):
            await trickle()
        assert (await client.answer())[0] == 408


@pytest.mark.parametrize(
    "header",
    [b"X-A: " + b"a" * 2**20, b"X-A: b\r\n" * 2**16, b"X-" + b"a" * 2**17],
    ids=["one value", "many headers", "one name"],
)
async def test_large_headers_are_refused_while_they_come(header: bytes) -> None:
    async with serving_stand(limits=LIMITS) as stand, connected(stand) as client:
        await client.send(HALF_OPEN + header)
        status, body = await client.answer()
        assert (status, body and body["error"]["code"]) == (431, "headers_too_large")


async def test_headers_just_below_the_limit_are_accepted_in_any_pieces() -> None:
    filler = b"X-A: " + b"a" * (2**16 - len(HEALTH) - len(b"X-A: \r\n")) + b"\r\n\r\n"
    async with serving_stand(limits=LIMITS) as stand, connected(stand) as client:
        for _ in range(3):  # the bytes of one request do not count for the next
            assert await client.ask(HALF_OPEN + filler) == 200
        await client.send((HALF_OPEN + filler)[:40_000])
        assert await client.ask((HALF_OPEN + filler)[40_000:]) == 200
        assert await client.ask(post(b'{"model": "%s"}' % (b"x" * 300_000))) == 400


async def test_bodies_must_come_at_a_rate() -> None:
    async with serving_stand(limits=replace(LIMITS, receive_timeout_s=SOON)) as stand, connected(stand) as client:
        assert await client.ask(post(b"{", length=1000)) == 408
        assert await client.is_closed()
        assert closed(stand, "slow_body") == 1
        assert stand.worker.served == []


async def test_a_fast_part_of_a_body_pays_for_no_silence() -> None:
    limits = replace(LIMITS, receive_timeout_s=SOON, body_bytes_per_s=1.0)
    async with serving_stand(limits=limits) as stand, connected(stand) as client:
        assert await client.ask(post(CHAT)[:-1]) == 408


class FakeConnection:
    """A connection of which the table needs nothing but its address."""

    address = "192.0.2.1"
    is_read_paused = False
    num_unsent = 0

    def __init__(self, is_sending_body: bool = True) -> None:
        self.is_sending_body = is_sending_body
        self.closed: Closed | None = None

    def give_up(self, reason: Closed) -> None:
        self.closed = reason

    def abort(self) -> None:
        raise AssertionError("nothing is unsent")


async def test_a_body_that_keeps_the_rate_is_read_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ConnectionLimits(receive_timeout_s=10.0, body_bytes_per_s=100.0)
    now_s, table = [0.0], ConnectionTable(limits, count_closed=lambda reason: None)
    monkeypatch.setattr(table, "_now", lambda: now_s[0])
    steady, slow = FakeConnection(), FakeConnection()
    for _ in range(100):
        now_s[0] += 9.0
        table.await_more(steady, 900)
        table.await_more(slow, 850)  # a little less than the rate
        table._sweep()
    assert steady.closed is None
    assert slow.closed is Closed.SLOW_BODY


async def test_half_open_connections_make_room_first_then_idle_ones_then_uploads() -> None:
    table = ConnectionTable(ConnectionLimits(max_connections=3), count_closed=lambda reason: None)
    upload, idle, half_open = connections = [FakeConnection(is_sending_body=n == 0) for n in range(3)]
    for connection in connections:
        table.admit(connection)
    table.await_request(idle)
    order = []
    for _ in range(3):
        new = FakeConnection()
        table.admit(new)
        table.clear(new)  # it is served
        order += [c for c in connections if c.closed is Closed.REPLACED and c not in order]
    assert order == [half_open, idle, upload]


async def test_the_rest_of_a_refused_body_must_come_soon() -> None:
    limits = replace(LIMITS, receive_timeout_s=SOON)
    async with serving_stand(limits=limits, max_body_mb=Bytes(100)) as stand, connected(stand) as client:
        assert await client.ask(post(b"{", length=10**6)) == 413
        assert await client.is_closed()
    async with serving_stand(limits=LIMITS, max_body_mb=Bytes(100)) as stand, connected(stand) as client:
        assert await client.ask(post(b"{", length=200)) == 413
        await client.send(b" " * 199)
        assert await client.ask(HEALTH) == 200  # the connection can be used again


async def test_busy_connections_are_kept_and_new_ones_refused() -> None:
    limits = replace(LIMITS, max_connections=3, max_per_address=3)
    async with serving_stand(limits=limits) as stand:
        stand.worker.gate.clear()
        async with many(stand, 3, post(CHAT)) as clients:
            await until(lambda: len(stand.worker.served) == 3)
            async with connected(stand) as refused:
                status, body = await refused.answer()
                assert (status, body and body["error"]["code"]) == (503, "server_overloaded")
            stand.worker.gate.set()
            assert [(await client.answer())[0] for client in clients] == [200, 200, 200]


async def test_one_address_cannot_take_every_connection() -> None:
    limits = replace(LIMITS, max_connections=10, max_per_address=3)
    async with serving_stand(limits=limits) as stand:
        stand.worker.gate.clear()
        async with many(stand, 3, post(CHAT), source="127.0.0.2"):
            await until(lambda: len(stand.worker.served) == 3)
            async with connected(stand, "127.0.0.2") as refused:
                assert (await refused.answer())[0] == 503
            async with connected(stand) as other:
                assert await other.ask(HEALTH) == 200


async def test_a_client_that_does_not_read_is_closed() -> None:
    more_than_the_kernel_holds = bytes(16 * 2**20)
    async with serving_stand(limits=replace(LIMITS, send_timeout_s=SOON)) as stand:
        file = await stand.client.files.create(file=("large", more_than_the_kernel_holds), purpose="user_data")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = stand.url.removeprefix("http://").split(":")
            client.connect((host, int(port)))
            client.sendall(f"GET /v1/files/{file.id}/content HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            await until(lambda: closed(stand, "slow_reader") == 1)


@pytest.mark.parametrize("repeated", [HEALTH, post(CHAT)])
async def test_many_requests_at_once_on_one_connection_are_refused(repeated: bytes) -> None:
    async with serving_stand(limits=LIMITS) as stand, connected(stand) as client:
        await client.send(repeated * 10)
        assert [(await client.answer())[0] for _ in range(10)] == [200] * 10
        await client.send(repeated * 1000)
        with suppress(ConnectionResetError):
            assert (await client.reader.read()).count(b"HTTP/1.1 200") < 100
        assert await client.is_closed()
        assert len(stand.worker.served) < 100


async def test_a_request_to_upgrade_is_answered_as_if_it_were_none() -> None:
    upgrade = HALF_OPEN + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    async with serving_stand(limits=replace(LIMITS, max_connections=4, max_per_address=4)) as stand:
        for _ in range(12):  # none of them keeps its place
            async with connected(stand) as client:
                assert await client.ask(upgrade + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n") == 200
