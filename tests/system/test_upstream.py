"""The whole server in front of another one: `tidegate serve --engine openai` with a scripted server.

What goes wrong at that server is played in virtual time (tests/scheduler/drivers/streams).
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from engine.upstream.dialects import CHAT_PATH
from tests.engine.upstream.scripted import ScriptedServer, scripted_server, tokens_after
from tests.system.server import START_TIMEOUT_S, Server, free_port, make_client, running, wait_for

pytestmark = pytest.mark.full

KILL_LIMIT_S = 5.0  # after the worker's SIGKILL, the upstream must run nothing of it


def bound_to(port: int) -> socket.socket:
    """Return a socket for the next server on a port, at which another one may have ended just now."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


@pytest.fixture(scope="module")
def upstream_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, upstream_port: int) -> Iterator[Server]:
    """One server for all tests here, started before its upstream. Each test runs an upstream on the same port."""
    flags = ("--engine", "openai", "--upstream", f"http://127.0.0.1:{upstream_port}", "--upstream-stall-s", "20")
    with running(tmp_path_factory.mktemp("upstream"), *flags, "--image-tokens", "100") as started:
        said = "the upstream does not answer yet; the worker waits for it"
        wait_for(lambda: started.has_logged(said), START_TIMEOUT_S, said)
        yield started


@pytest_asyncio.fixture
async def upstream(server: Server, upstream_port: int) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(bound_to(upstream_port)) as scripted:
        await asyncio.to_thread(server.wait_until_ready)
        scripted.bodies.clear()
        yield scripted


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with make_client(server) as openai_client:
        yield openai_client


async def ask(client: AsyncOpenAI, prompt: list[int], max_tokens: int = 20, tier: str = "default") -> list[int]:
    """Return the tokens of one completion."""
    answer = await client.completions.create(
        model="tidegate-demo",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"service_tier": tier, "return_token_ids": True, "ignore_eos": True},
    )
    return list(answer.choices[0].model_extra["token_ids"]) if answer.choices[0].model_extra else []


async def test_it_serves_once_the_upstream_answers(server: Server, upstream: ScriptedServer) -> None:
    assert server.has_logged("the upstream answers")
    workers = httpx.get(f"{server.root}/ready", timeout=30).json()["workers"]
    assert [worker["device"] for worker in workers] == ["vllm"]


@pytest.mark.parametrize("tier", ["default", "flex"])
async def test_answers_are_the_upstreams(client: AsyncOpenAI, upstream: ScriptedServer, tier: str) -> None:
    assert await ask(client, [30, 31, 32], tier=tier) == tokens_after([30, 31, 32], 20)


async def test_a_chat_with_an_image_reaches_the_upstream_as_it_came(
    client: AsyncOpenAI, upstream: ScriptedServer
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    answer = await client.chat.completions.create(model="tidegate-demo", messages=messages, max_tokens=4)
    [body] = upstream.bodies
    assert (body["messages"], body["max_tokens"], upstream.paths[-1]) == (messages, 4, CHAT_PATH)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(json.dumps(messages))


async def test_a_killed_worker_leaves_nothing_running_at_the_upstream(
    server: Server, client: AsyncOpenAI, upstream: ScriptedServer
) -> None:
    """Its connections end with its process. Then its successor serves what it left."""
    upstream.gate.clear()
    asked = [asyncio.create_task(ask(client, [80 + i, 81], tier="flex")) for i in range(4)]
    await upstream.wait_until("num_open", 4)
    server.kill("worker")
    async with asyncio.timeout(KILL_LIMIT_S):
        await upstream.wait_until("num_open", 0)
    upstream.gate.set()
    assert await asyncio.gather(*asked) == [tokens_after([80 + i, 81], 20) for i in range(4)]
