"""A TCP proxy between one part and the store, which can be slowed down and cut.

Knows bytes; does not know Redis.
"""

import asyncio
import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

CHUNK_BYTES = 2**16


class Link:
    """One part's way to the store, as `async with`. `delay_s` holds back every chunk; `cut` ends all connections."""

    def __init__(self, store: Path) -> None:
        self.delay_s = 0.0
        self._store = store
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None, "the link is used as `async with`"
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """End all connections, and refuse new ones until `mend`."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as closing, contextlib.suppress(OSError):
            closing.callback(writer.close)
            if self._is_cut:
                return
            store_reader, store_writer = await asyncio.open_unix_connection(str(self._store))
            closing.callback(store_writer.close)
            pair = {writer, store_writer}
            self._writers |= pair
            closing.callback(self._writers.difference_update, pair)
            ways = [
                asyncio.create_task(self._pass_on(reader, store_writer)),
                asyncio.create_task(self._pass_on(store_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
