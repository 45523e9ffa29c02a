"""A proxy to a server whose connections can stall: they stay open, and no byte passes any more."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest


class StallingProxy:
    """Forwards bytes between its own socket, or its TCP port on 127.0.0.1, and the server's socket.

    With `tls`, clients of its port speak TLS.
    """

    def __init__(self, server: str, place: Path | int, tls: ssl.SSLContext | None = None) -> None:
        if not server.startswith("unix://"):
            pytest.skip("the proxy leads to one server")
        self._tls = tls
        self._server = server
        self._place = place
        self._pipes: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"unix://{self._place}"

    def stall(self) -> None:
        """Stall the present connections without closing them. Later ones work."""
        for pipe in self._pipes:
            pipe.cancel()

    def lose_replies(self) -> None:
        """Let commands through on the present connections, and no reply. Later connections work."""
        for pipe in self._pipes[1::2]:
            pipe.cancel()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["StallingProxy"]:
        if isinstance(self._place, int):
            server = await asyncio.start_server(self._connect, "127.0.0.1", self._place, ssl=self._tls)
        else:
            server = await asyncio.start_unix_server(self._connect, self._place)
        async with server:
            yield self
            self.stall()
            await asyncio.gather(*self._pipes, return_exceptions=True)
            for writer in self._writers:  # before the server's end, which waits for its connections from Python 3.12 on
                writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._server.removeprefix("unix://"))
        except OSError:  # the server is down
            writer.close()
            return
        self._writers += [writer, far_writer]
        self._pipes += [
            asyncio.create_task(_pipe(reader, far_writer)),
            asyncio.create_task(_pipe(far_reader, writer)),
        ]


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()
