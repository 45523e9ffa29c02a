"""A receiver of webhooks for tests: a real HTTP server on this machine that keeps what it gets."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Receiver:
    """`statuses` are those of the next answers; later ones have 204. `port` is where it listens on 127.0.0.1."""

    port: int = 0
    statuses: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)  # headers and body of each request
    answers: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: answers are held back
    more: bytes = b""  # further headers of the answers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            self.got.append((headers, await reader.readexactly(int(headers["content-length"]))))
            await self.answers.wait()
            status = self.statuses.pop(0) if self.statuses else 204
            writer.write(f"HTTP/1.1 {status} X\r\n".encode() + self.more + b"content-length: 0\r\n\r\n")
            await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def receiving(context: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    receiver.answers.set()
    server = await asyncio.start_server(receiver.take, "127.0.0.1", 0, ssl=context)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
