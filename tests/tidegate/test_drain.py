"""How a gateway ends, with a real HTTP server: how long it listens, and what requests get meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from gateway.app import create_app
from tests.gateway.stand import Stand, running_stand
from tests.waiting import until
from tidegate.gateway import drain as draining
from tidegate.gateway.drain import Drain
from tidegate.gateway.process import _Server
from tidegate.supervision.process import listen

CHAT = {"model": "alias", "messages": [{"role": "user", "content": "Hi"}]}
FOR_EVER_S = 600.0


class Ending:
    """A gateway's server that a test ends, beside the one of its stand."""

    def __init__(self, stand: Stand, server: uvicorn.Server, serving: "asyncio.Task[None]", url: str) -> None:
        self.stand = stand
        self.server = server
        self.serving = serving
        self.url = url

    def signal(self, drain_s: float = FOR_EVER_S) -> Drain:
        drain = Drain(self.server, self.stand.gateway.client, drain_s)
        drain()
        return drain

    @property
    def num_waiting(self) -> int:
        return self.stand.gateway.client.num_open


@asynccontextmanager
async def ending_gateway() -> AsyncIterator[Ending]:
    async with running_stand(lambda request: []) as stand:  # no request gets an answer
        listener = listen("127.0.0.1", 0)
        server = _Server(uvicorn.Config(create_app(stand.gateway), log_config=None, lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield Ending(stand, server, serving, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            await serving


async def test_a_draining_gateway_listens_and_refuses_with_503_until_its_requests_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "LISTEN_S", 0.0)
    async with ending_gateway() as ending, httpx.AsyncClient(base_url=ending.url, timeout=30) as client:
        open_request = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: ending.num_waiting == 1)
        ending.signal()
        for path in ("/v1/models", "/v1/files", "/v1/batches"):
            async with httpx.AsyncClient(base_url=ending.url, timeout=30) as late:
                refused = await late.get(path)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_overloaded"
            assert refused.headers["retry-after"] == "5"
            assert refused.headers["connection"] == "close"
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["draining"]) == (503, True)
        assert (await client.get("/health")).status_code == 200
        ending.stand.gateway.client.fail_open("the end of the request")
        await open_request
        await asyncio.wait_for(ending.serving, 30)


async def test_it_listens_for_some_seconds_after_its_last_request_if_a_client_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "LISTEN_S", FOR_EVER_S)
    async with ending_gateway() as ending, httpx.AsyncClient(base_url=ending.url, timeout=30) as client:
        await client.get("/health")  # the connection stays open
        ending.signal()
        for _ in range(3):
            await asyncio.sleep(2 * draining.CHECK_S)
            assert (await client.get("/ready")).status_code == 503
        monkeypatch.setattr(draining, "LISTEN_S", 0.0)
        await asyncio.wait_for(ending.serving, 30)


async def test_a_client_that_was_refused_finds_the_port_open_when_it_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is closed with the refusal, so for a moment no client is connected."""
    monkeypatch.setattr(draining, "LISTEN_S", FOR_EVER_S)
    async with ending_gateway() as ending:
        async with httpx.AsyncClient(base_url=ending.url, timeout=30) as client:
            await client.get("/health")
            ending.signal()
            assert (await client.post("/v1/chat/completions", json=CHAT)).headers["connection"] == "close"
        await until(lambda: not ending.server.server_state.connections)
        await asyncio.sleep(2 * draining.CHECK_S)
        async with httpx.AsyncClient(base_url=ending.url, timeout=30) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503
        monkeypatch.setattr(draining, "LISTEN_S", 0.0)
        await asyncio.wait_for(ending.serving, 30)


async def test_it_ends_at_once_if_its_last_client_hangs_up_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "LISTEN_S", FOR_EVER_S)
    async with ending_gateway() as ending:
        async with httpx.AsyncClient(base_url=ending.url, timeout=30) as client:
            open_request = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            await until(lambda: ending.num_waiting == 1)
            ending.signal()
            ending.stand.gateway.client.fail_open("the end of the request")
            await open_request
        await asyncio.wait_for(ending.serving, 30)


async def test_what_the_end_of_the_drain_cuts_off_gets_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation is failed by the scheduler's client, and any other request by the server, which cancels it."""

    async def never_ends() -> dict[str, int]:
        await asyncio.Event().wait()
        return {}

    async with ending_gateway() as ending, httpx.AsyncClient(base_url=ending.url, timeout=30) as client:
        monkeypatch.setattr(ending.stand.gateway.client, "depths", never_ends)
        monkeypatch.setattr("gateway.routes.ops.STORE_TIMEOUT_S", FOR_EVER_S)
        cut = [client.post("/v1/chat/completions", json=CHAT), client.get("/ready")]
        requests = [asyncio.create_task(request) for request in cut]
        await until(lambda: ending.num_waiting == 1 and len(ending.server.server_state.tasks) == 2)
        ending.signal(drain_s=draining.LAST_WORDS_S)
        answers = await asyncio.gather(*requests)
        await asyncio.wait_for(ending.serving, 30)
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
        assert answer.headers["retry-after"] == "5"


async def test_a_second_signal_ends_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ending_gateway() as ending, httpx.AsyncClient(base_url=ending.url, timeout=30) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: ending.num_waiting == 1)
        drain = ending.signal()
        drain()
        assert (await request).status_code == 503
        await asyncio.wait_for(ending.serving, 30)
