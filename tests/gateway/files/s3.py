"""An S3-compatible server with one bucket, and a way to it that a test can cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

BUCKET = "bucket"
Address = tuple[str, int]


@contextlib.contextmanager
def s3_server() -> Iterator[Address]:
    """Run moto's S3 server, and yield its address."""
    server: Any = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        httpx.put(f"http://{host}:{port}/{BUCKET}", timeout=30).raise_for_status()
        yield host, port
    finally:
        server.stop()


def s3_options(address: Address) -> dict[str, Any]:
    """Return fsspec's configuration of the protocol `s3`."""
    endpoint = f"http://{address[0]}:{address[1]}"
    return {"endpoint_url": endpoint, "key": "k", "secret": "s", "client_kwargs": {"region_name": "us-east-1"}}


class Way:
    """A TCP proxy to `target`. While it is cut, open connections are aborted and new ones end at once."""

    def __init__(self, target: Address) -> None:
        self.address: Address = ("", 0)
        self.refused = 0  # connections
        self.is_cut = False
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self._pipes: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Way"]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = server.sockets[0].getsockname()
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*self._pipes, return_exceptions=True)

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def mend(self) -> None:
        self.is_cut = False

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            self.refused += 1
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, far_writer]
        for way in (_pipe(reader, far_writer), _pipe(far_reader, writer)):
            pipe = asyncio.create_task(way)
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()
