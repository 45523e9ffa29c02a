"""Clients of HTTP/1.0: answers are not chunked, and end with the connection."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.gateway.stand import Stand, serving_stand
from tests.gateway.tiny_model import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def exchange(
    stand: Stand, version: str, body: dict[str, Any], *headers: str
) -> tuple[str, dict[str, str], bytes]:
    """Send one request over a socket of its own. Return the status line, the headers, and all bytes behind them."""
    address = urlsplit(stand.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = json.dumps(body).encode()
    lines = [f"POST /v1/chat/completions HTTP/{version}", f"Content-Length: {len(data)}", "Host: localhost", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *fields = head.decode().split("\r\n")
    return status, dict(field.lower().split(": ", 1) for field in fields), rest


async def test_a_stream_is_not_chunked() -> None:
    async with serving_stand("Hello there!") as stand:
        status, headers, body = await exchange(stand, "1.0", {**CHAT, "stream": True})
    assert status.startswith("HTTP/1.1 200")
    assert headers["connection"] == "close"
    assert "transfer-encoding" not in headers and "content-length" not in headers
    assert headers["content-type"].startswith("text/event-stream") and headers["x-request-id"]
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("keep", [(), ("Connection: keep-alive",)])
async def test_a_whole_answer_has_its_length(keep: tuple[str, ...]) -> None:
    async with serving_stand("Hello there!") as stand:
        status, headers, body = await exchange(stand, "1.0", CHAT, *keep)
    assert status.startswith("HTTP/1.1 200")
    assert (int(headers["content-length"]), headers["connection"]) == (len(body), "close")
    assert json.loads(body)["choices"][0]["message"]["content"] == "Hello there!"
