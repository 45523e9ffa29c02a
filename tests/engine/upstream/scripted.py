"""A scripted server of OpenAI's kind, in the process of the test.

The token after n known tokens is a function of the prompt and of n, so a continued stream can be told from a repeated
one. A script says what happens to each further stream; events say when, so that no test sleeps.
"""

import asyncio
import contextlib
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.upstream.http import Address, HttpSender

MODEL = "scripted"
VOCAB = 1000
UNLIMITED = 5  # tokens of an answer without a maximum


def token_after(known: Sequence[int]) -> int:
    """Return the token that follows these tokens: never one below 10, which may be special."""
    return 10 + (known[0] * 31 + len(known) * 7) % (VOCAB - 10)


def tokens_after(prompt: Sequence[int], count: int) -> list[int]:
    known = list(prompt)
    for _ in range(count):
        known.append(token_after(known))
    return known[len(prompt) :]


def vector_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to /v1/embeddings or /v1/rerank: the length of the input, or that of the document."""
    if "documents" in body:
        [document] = body["documents"]
        return {"results": [{"index": 0, "relevance_score": len(document) / 100, "document": {"text": document}}]}
    return {"object": "list", "data": [{"index": 0, "embedding": [0.5, float(len(body["input"]))]}]}


@dataclass
class Script:
    """What happens to one stream."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""  # of an answer that is no stream
    # The stream goes wrong after this many tokens: "cut" closes the connection, "half" closes it inside an event, "end"
    # ends the stream without a finish reason, "error" sends an error event, "hang" sends nothing more.
    after: int | None = None
    then: str = "cut"
    events: tuple[dict[str, Any], ...] = ()  # all events of the stream, if there are any


@dataclass
class ScriptedServer:
    """The server's state, for the test to read and to set."""

    owned_by: str = "vllm"
    models: tuple[str, ...] = (MODEL,)
    scripts: deque[Script] = field(default_factory=deque)  # of the next streams, one each
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of all streams
    paths: list[str] = field(default_factory=list)  # of all streams
    request_headers: list[dict[str, str]] = field(default_factory=list)  # of all streams
    root: str | None = None  # where it has the model from
    models_status: int = 200  # of /v1/models
    token_offset: int = 0  # is added to each token
    priorities: bool = True
    returns_ids: bool = True
    cached_block: int = 0  # tokens of the blocks of prompts that it finds again, and says so; 0: it finds none
    ends_apart: bool = False  # whether the reason of the end has an event of its own, as Tidegate sends it
    key: str = ""
    metrics: str = ""
    properties: str = ""
    cuts_pages: bool = False  # whether it closes the connection when it is asked for these two
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # tokens wait until it is set
    num_open: int = 0
    num_hung_up: int = 0  # streams that the client closed before their end
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    address: Address = Address("127.0.0.1", 0)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def url(self) -> str:
        return str(self.address)

    @property
    def sender(self) -> HttpSender:
        return HttpSender(self.address)

    async def wait_until(self, what: str, count: int) -> None:
        """Wait until the number `what` of this server is `count`."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: getattr(self, what) == count)

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # -- HTTP ------------------------------------------------------------------------------------------------------

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split("\r\n", 1)[0].split()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if self.key and headers.get("authorization") != f"bearer {self.key}".lower():
                await self._answer(writer, 401, '{"error": "no"}')
            elif method == "GET":
                await self._get(writer, path)
            else:
                self.request_headers.append(headers)
                self.paths.append(path)
                await self._post(reader, writer, json.loads(body))
        writer.close()

    async def _get(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path.endswith("/v1/models"):
            common = {"owned_by": self.owned_by, "max_model_len": 512, "root": self.root}
            data = [{"id": name, **common} for name in self.models]
            await self._answer(writer, self.models_status, json.dumps({"data": data}))
        elif not self.cuts_pages:
            page = self.properties if path.endswith("/props") else self.metrics
            await self._answer(writer, 200 if page else 404, page)

    async def _answer(
        self, writer: asyncio.StreamWriter, status: int, text: str, headers: dict[str, str] | None = None
    ) -> None:
        lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(text.encode())}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n" + text).encode())
        await writer.drain()

    async def _post(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if body.get("priority") and not self.priorities:
            await self._answer(writer, 400, '{"error": {"message": "no priority scheduling"}}')
            return
        self.bodies.append(body)
        script = self.scripts.popleft() if self.scripts else Script()
        if script.status != 200:
            await self._answer(writer, script.status, script.body, script.headers)
            return
        if "prompt" not in body and "messages" not in body:
            is_taken = self.returns_ids or not isinstance(body.get("input"), list)
            await self._answer(writer, 200 if is_taken else 400, script.body or json.dumps(vector_of(body)))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.num_open += 1
        await self._note()
        sending = asyncio.create_task(self._send(writer, body, script))
        leaving = asyncio.create_task(reader.read())  # ends when the client hangs up
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            self.num_hung_up += not sending.done()
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self.num_open -= 1
            await self._note()

    async def _send(self, writer: asyncio.StreamWriter, body: dict[str, Any], script: Script) -> None:
        is_chat = "messages" in body
        prompt = json.dumps(body["messages"]) if is_chat else body["prompt"]
        known = [len(prompt)] if isinstance(prompt, str) else list(prompt)
        count = body.get("max_tokens", body.get("n_predict", UNLIMITED))
        for event in script.events:
            self._event(writer, json.dumps(event))
        count = 0 if script.events else count
        is_known = self.cached_block and body in self.bodies[:-1]
        cached = (len(prompt) - 1) // self.cached_block * self.cached_block if is_known else 0
        for number in range(count):
            await self.gate.wait()
            if script.after == number:
                await self._go_wrong(writer, script.then)
                return
            token = token_after(known) + self.token_offset
            known.append(token)
            if "n_predict" in body:  # llama.cpp's own events, the last of which says all
                self._event(writer, json.dumps({"content": f" w{token}", "tokens": [token], "stop": False}))
                continue
            choice: dict[str, Any] = {"index": 0, "text": f" w{token}", "finish_reason": None}
            if is_chat:
                choice["delta"] = {"role": "assistant", "content": choice.pop("text")}
            if self.returns_ids and (not isinstance(prompt, str) or body.get("return_token_ids")):
                choice["token_ids"] = [token]
            if number == count - 1 and not self.ends_apart:
                choice["finish_reason"] = "length"
            self._event(writer, json.dumps({"choices": [choice]}))
            if number == count - 1 and self.ends_apart:
                self._event(writer, json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
            await writer.drain()
            await asyncio.sleep(0)
        if body.get("stream_options"):
            usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
            self._event(writer, json.dumps({"choices": [], "usage": usage}))
        if "n_predict" in body and not script.events:
            self._event(writer, json.dumps({"stop": True, "stop_type": "limit", "timings": {"cache_n": cached}}))
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _go_wrong(self, writer: asyncio.StreamWriter, how: str) -> None:
        if how == "hang":
            await asyncio.Event().wait()
        elif how == "half":
            writer.write(b'30\r\ndata: {"choices": [{"te')
        elif how == "end":
            writer.write(b"0\r\n\r\n")
        elif how == "error":
            self._event(writer, json.dumps({"error": {"message": "the engine is dead", "code": 500}}))
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")


def bound_socket() -> socket.socket:
    """Return a socket with a port of its own, which takes no connections yet."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


@asynccontextmanager
async def scripted_server(bound: socket.socket | None = None, **fields: Any) -> AsyncIterator[ScriptedServer]:
    """Run a scripted server on `bound` or a socket of its own. Leaving the block cuts all its connections."""
    state = ScriptedServer(**fields)
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await state.handle(reader, writer)
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(handle, sock=bound or bound_socket())
    state.address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield state
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
