"""The HTTP client of a load test: sends one request on one connection, and times the bytes as the socket delivers them.

It uses an asyncio protocol and httptools instead of a client library. On a machine that also runs the model, the server
loses the CPU time that the client uses. A token event costs 4 µs of CPU time and one wake-up of the process. Each
request has its own connection, and with TLS a handshake of its own, which its times include. Knows HTTP/1.1 and
OpenAI's two generation routes; does not know when to send (see `runner`).
"""

import asyncio
import ipaddress
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from loadtest.client.answer import AnswerReader, Outcome

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
MAX_QUOTED = 200  # number of bytes quoted in an error message if the body is no OpenAI error
_KEY_HINT = " (the key is read from TIDEGATE_API_KEY, or OPENAI_API_KEY)"
HINTS = {401: _KEY_HINT, 403: _KEY_HINT, 404: " (is this the base URL of an OpenAI-compatible server?)"}


class TargetError(Exception):
    """The server cannot be used: the URL is wrong, the server does not answer, or it has no model."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server, with the model and the API key for its requests. `model` may be empty at first."""

    host: str
    port: int
    prefix: str = ""
    model: str = ""
    api_key: str = ""
    is_tls: bool = False

    @property
    def tls(self) -> ssl.SSLContext | None:
        return _tls_context() if self.is_tls else None

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def head(self, method: str, path: str, body: bytes) -> bytes:
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.authority}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n"


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


def parse_target(url: str, allow_remote: bool = False, api_key: str = "") -> Target:
    """Return the target for a URL of the form `http[s]://host:port[/prefix][/v1]`. Raises `TargetError`.

    A host other than this machine needs `allow_remote`, because a load test of the wrong host is an attack.
    """
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TargetError(f"{url}: expected http://HOST:PORT or https://HOST")
    if not allow_remote and not _is_loopback(parts.hostname):
        raise TargetError(f"{parts.hostname} is not this machine; --allow-remote sends load elsewhere")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, parts.port or (443 if is_tls else 80), prefix, api_key=api_key, is_tls=is_tls)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Exchange(asyncio.Protocol):
    """An asyncio protocol that sends one request and feeds the body of the response to `reader`.

    `done` resolves at the end of the response, or when the connection fails.
    """

    def __init__(self, request: bytes, outcome: Outcome, reader: AnswerReader) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._outcome = outcome
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.BaseTransport | None = None
        self._now_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_s = perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc or 'closed before the answer was complete'}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._outcome.retry_after_s = float(value) if value.isdigit() else None

    def on_headers_complete(self) -> None:
        self._outcome.status = self._parser.get_status_code()
        if self._outcome.status != 200:
            self._reader.expect_whole()

    def on_body(self, body: bytes) -> None:
        self._reader.feed(body, self._now_s)

    def on_message_complete(self) -> None:
        self._reader.finish(self._now_s)
        self._end(None)

    def _end(self, error: str | None) -> None:
        if self.done.done():
            return
        if error is not None:
            self._outcome.error = error
        if self._transport is not None:
            self._transport.close()
        self.done.set_result(None)


async def send(target: Target, path: str, body: bytes, outcome: Outcome, streamed: bool) -> None:
    """POST `body` and fill `outcome` until the answer ends. Every failure is stored in `outcome.error`.

    Cancelling the call closes the connection.
    """
    reader = AnswerReader(outcome, streamed)
    request = target.head("POST", path, body) + body
    outcome.sent_s = perf_counter()
    await _exchange(target, lambda: _Exchange(request, outcome, reader), outcome)


async def _exchange(target: Target, factory: Callable[[], _Exchange], outcome: Outcome) -> None:
    loop = asyncio.get_running_loop()
    protocol = factory()
    try:
        transport, _ = await loop.create_connection(lambda: protocol, target.host, target.port, ssl=target.tls)
    except OSError as error:
        outcome.error = f"cannot connect: {error.strerror or error}"
        return
    except asyncio.CancelledError:
        protocol.done.cancel()  # so that closing the connection does not count as a failure
        raise
    try:
        await protocol.done
    finally:
        transport.abort()


def completion_body(
    target: Target, prompt: list[int] | str, max_tokens: int, *, stream: bool = True, **extra: Any
) -> tuple[str, bytes]:
    """Return the path and the JSON body of a request for exactly `max_tokens` greedy tokens.

    A prompt of token ids is sent to /v1/completions; a text is sent as a chat message. The fields in `extra` replace
    the default fields. Fields whose value is None are left out.
    """
    chat = isinstance(prompt, str)
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    body |= extra
    path = CHAT_PATH if chat else COMPLETIONS_PATH
    return path, msgspec.json.encode({k: v for k, v in body.items() if v is not None})


async def get(target: Target, path: str, timeout_s: float = 10.0) -> bytes:
    """Return the body of the response to a GET request. Raises `TargetError` unless the status is 200."""
    return await _call(target, "GET", path, b"", timeout_s)


async def post(target: Target, path: str, body: dict[str, Any], timeout_s: float = 30.0) -> bytes:
    """POST `body` as JSON and return the body of the response. Raises `TargetError` unless the status is 200."""
    return await _call(target, "POST", path, msgspec.json.encode(body), timeout_s)


async def _call(target: Target, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
            try:
                writer.write(target.head(method, path, body) + body)
                response = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise TargetError(f"{target}{path}: {reason}") from error
    return _body_of(response, f"{target}{path}")


class _Collected:
    """Callbacks for httptools that collect the body of a response."""

    def __init__(self) -> None:
        self.body = b""

    def on_body(self, body: bytes) -> None:
        self.body += body


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


def _body_of(response: bytes, url: str) -> bytes:
    collected = _Collected()
    parser = httptools.HttpResponseParser(collected)
    try:
        parser.feed_data(response)
    except httptools.HttpParserError as error:
        raise TargetError(f"{url}: not HTTP: {error}") from error
    status = parser.get_status_code()
    if status != 200:
        raise TargetError(f"{url}: HTTP {status}: {_message_of(collected.body)}{HINTS.get(status, '')}")
    return collected.body


def _message_of(body: bytes) -> str:
    """Return the message of an OpenAI error, or the beginning of another body in one line."""
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.MsgspecError:
        return " ".join(body[:MAX_QUOTED].decode(errors="replace").split())


async def discover_model(target: Target) -> str:
    """Return the id of the first model that the server lists. Raises `TargetError`."""

    class _Model(msgspec.Struct):
        id: str

    class _Models(msgspec.Struct):
        data: list[_Model]

    try:
        models = msgspec.json.decode(await get(target, "/v1/models"), type=_Models)
    except msgspec.DecodeError as error:
        raise TargetError(f"{target}/v1/models: not an OpenAI-compatible server: {error}") from error
    if not models.data:
        raise TargetError(f"{target}/v1/models: the server lists no model")
    return models.data[0].id
