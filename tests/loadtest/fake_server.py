"""An OpenAI-compatible server for tests of the client: it answers at once, and as it is told.

Uses a real socket and real HTTP framing, but no model: text comes from `reply`, and there is no delay.
"""

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

Body = dict[str, Any]


def repeat_or_count(body: Body) -> list[str]:
    """The pieces of the answer: the nonce after `Repeat: `, or `max_tokens` words."""
    prompt = body["messages"][-1]["content"] if "messages" in body else ""
    if prompt.startswith("Repeat: "):
        nonce = prompt.removeprefix("Repeat: ")
        return [nonce[:4], nonce[4:]]
    return [f" w{i}" for i in range(body["max_tokens"])]


@dataclass
class FakeServer:
    """`async with FakeServer() as server:` listens on a free port until the block ends."""

    reply: Callable[[Body], list[str]] = repeat_or_count
    status: Callable[[Body], int] = lambda body: 200
    is_silent: Callable[[Body], bool] = lambda body: False  # these get no answer until the client hangs up
    tls: ssl.SSLContext | None = None
    streams: bool = True  # otherwise, a request for a stream gets its whole answer at once
    separator: str = "\n"
    output_file_id: str | None = "file-2"  # of every batch
    step_seconds: float = 0.0  # what /metrics says; each request adds a tenth
    requests: list[Body] = field(default_factory=list)
    contents_asked: list[str] = field(default_factory=list)  # paths
    lines: list[Body] = field(default_factory=list)  # of the uploaded batch file
    tiers: list[Body] = field(default_factory=list)  # every document that was put in force, in order

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def hang_up(self) -> None:
        """Refuse connections from now on. Answers that have begun go on."""
        self._server.close()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lengths = [line for line in head.splitlines() if line.lower().startswith("content-length")]
            length = int(lengths[0].split(":")[1]) if lengths else 0
            raw = await reader.readexactly(length)
            await self._answer(head.split()[1], raw, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client hung up, as it does at the end of an arm
        finally:
            writer.close()

    async def _answer(self, path: str, raw: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            await self._whole(writer, 200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        elif path == "/metrics":
            text = f"# TYPE tidegate_step_seconds summary\ntidegate_step_seconds_sum {self.step_seconds}\n"
            await self._send(writer, 200, text.encode(), "text/plain")
        elif path == "/admin/tiers":
            self.tiers += [json.loads(raw)] if raw else []
            await self._whole(writer, 200, {"document": self.tiers[-1] if self.tiers else {}})
        elif path == "/admin/sla":
            await self._whole(writer, 200, {"workers": []})
        elif path.startswith(("/v1/files", "/v1/batches")):
            await self._batch(path, raw, writer)
        elif self.is_silent(json.loads(raw)):
            await reader.read()
        else:
            await self._generate(json.loads(raw), writer)

    async def _batch(self, path: str, raw: bytes, writer: asyncio.StreamWriter) -> None:
        """One file and one batch at a time are enough here; the batch is done at the first poll."""
        if path == "/v1/files":
            self.lines = [json.loads(line) for line in raw.splitlines() if line.startswith(b'{"custom_id"')]
            await self._whole(writer, 200, {"id": "file-1", "object": "file"})
        elif path == "/v1/batches":
            await self._whole(writer, 200, {"id": "batch_1", "status": "validating"})
        elif path == "/v1/batches/batch_1":
            done = {"id": "batch_1", "status": "completed", "output_file_id": self.output_file_id}
            await self._whole(writer, 200, done)
        else:
            self.contents_asked.append(path)
            answers = [self._batch_answer(line) for line in self.lines]
            await self._send(writer, 200, "\n".join(answers).encode(), "application/jsonl")

    def _batch_answer(self, line: Body) -> str:
        message = {"role": "assistant", "content": "".join(self.reply(line["body"]))}
        response = {"status_code": 200, "body": {"choices": [{"message": message}]}}
        return json.dumps({"custom_id": line["custom_id"], "response": response})

    async def _generate(self, body: Body, writer: asyncio.StreamWriter) -> None:
        self.requests.append(body)
        self.step_seconds += 0.1
        status = self.status(body)
        if status != 200:
            error = {"message": "no", "type": "requests", "param": None, "code": "rate_limit_exceeded"}
            await self._whole(writer, status, {"error": error})
            return
        pieces = self.reply(body)
        if body.get("stream") and self.streams:
            await self._stream(body, pieces, writer)
            return
        usage = {"prompt_tokens": 3, "completion_tokens": len(pieces)}
        message = {"role": "assistant", "content": "".join(pieces)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        await self._whole(writer, 200, {"choices": [choice], "usage": usage, "service_tier": body.get("service_tier")})

    async def _stream(self, body: Body, pieces: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n"
        )
        events = [self._event(body, {"role": "assistant", "content": ""}, 0)]
        events += [self._event(body, {"content": piece}, done) for done, piece in enumerate(pieces, 1)]
        events.append(self._event(body, {}, len(pieces), finish_reason="length"))
        for event in [*events, "[DONE]"]:
            line = f"data: {event}{self.separator * 2}".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    def _event(body: Body, delta: Body, tokens: int, finish_reason: str | None = None) -> str:
        part = {"delta": delta} if "messages" in body else {"text": delta.get("content", "")}
        choice = {"index": 0, "finish_reason": finish_reason, **part}
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        return json.dumps({"choices": [choice], "usage": usage, "service_tier": body.get("service_tier")})

    async def _whole(self, writer: asyncio.StreamWriter, status: int, body: Body) -> None:
        await self._send(writer, status, json.dumps(body).encode(), "application/json")

    async def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes, kind: str) -> None:
        head = f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nRetry-After: 7\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await writer.drain()
