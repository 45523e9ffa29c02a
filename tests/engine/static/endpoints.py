"""Endpoints with fixed batches for tests: a function for `python:`, and one behind HTTP."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

BATCH = 4


def double(items: list[Any]) -> list[Any]:
    assert len(items) == BATCH
    return [ValueError(f"{item!r} is no number") if not isinstance(item, int) else 2 * item for item in items]


async def double_later(items: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return double(items)


not_a_function = 3

Answer = Callable[[dict[str, Any]], Awaitable[httpx.Response] | httpx.Response]


def http_transport(answer: Answer) -> httpx.MockTransport:
    """Return a transport that answers each call with `answer(body)`."""

    async def handle(request: httpx.Request) -> httpx.Response:
        response = answer(json.loads(request.content))
        return response if isinstance(response, httpx.Response) else await response

    return httpx.MockTransport(handle)
