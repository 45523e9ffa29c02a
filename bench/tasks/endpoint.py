"""An endpoint with fixed batches that takes a fixed time for a call and fails at random, on a free port."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


@dataclass(slots=True)
class FailingEndpoint:
    """Echoes items. `failing_calls` and `failing_items` are shares; a call with a `poison` item always fails."""

    batch: int
    call_s: float
    failing_calls: float = 0.0
    failing_items: float = 0.0
    poison: frozenset[int] = frozenset()
    calls: int = 0
    items: int = 0  # without padding
    wrong_sizes: int = 0  # calls that had not exactly a batch
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _draw: random.Random = field(default_factory=lambda: random.Random(7))

    async def answer(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        async with self._turn:  # one call at a time: that is its capacity
            await asyncio.sleep(self.call_s)
        self.calls += 1
        self.items += body["count"]
        self.wrong_sizes += len(body["items"]) != self.batch
        if self._draw.random() < self.failing_calls or self.poison & set(body["items"]):
            return Response("the call failed", status_code=500)
        return Response(msgspec.json.encode({"results": [self._result(item) for item in body["items"]]}))

    def _result(self, item: int) -> dict[str, object]:
        return {"error": "the item failed"} if self._draw.random() < self.failing_items else {"output": item}


@asynccontextmanager
async def serving_endpoint(endpoint: FailingEndpoint) -> AsyncIterator[str]:
    """Yield the endpoint's URL."""
    app = Starlette(routes=[Route("/run", endpoint.answer, methods=["POST"])])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # asyncio does this only for sockets that it has made itself. Without it, each answer may wait 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/run"
        finally:
            server.should_exit = True
            await serving
