"""Parts die, clients stay: what is lost when a worker, a gateway, the store or everything is killed. Nothing is."""

import asyncio
import io
import json
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai import APIError, AsyncOpenAI

from tests.system.nonces import MODEL, ask, ask_streamed, body, make_nonce
from tests.system.server import Server, running, wait_for

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path) as server:
        server.wait_until_ready()
        yield server


def make_client(server: Server, max_retries: int = 0) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.base_url, api_key="test", max_retries=max_retries, timeout=120)


def batch_input(nonces: list[str]) -> io.BytesIO:
    lines = [
        {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body(nonce)}
        for i, nonce in enumerate(nonces)
    ]
    file = io.BytesIO("\n".join(json.dumps(line) for line in lines).encode())
    file.name = "input.jsonl"
    return file


async def submit_batch(client: AsyncOpenAI, nonces: list[str]) -> str:
    file = await client.files.create(file=batch_input(nonces), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return batch.id


async def wait_for_lines(client: AsyncOpenAI, batch_id: str, completed: int) -> None:
    async with asyncio.timeout(90):
        while True:
            batch = await client.batches.retrieve(batch_id)
            assert batch.status in ("validating", "in_progress", "finalizing", "completed"), batch
            if batch.request_counts and batch.request_counts.completed >= completed:
                return
            await asyncio.sleep(0.02)


async def batch_answers(client: AsyncOpenAI, batch_id: str) -> list[tuple[str, str]]:
    """(custom_id, answer) of every output line, in the order of the ids."""
    async with asyncio.timeout(90):
        while (batch := await client.batches.retrieve(batch_id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            await asyncio.sleep(0.05)
    assert batch.output_file_id is not None
    lines = (await client.files.content(batch.output_file_id)).text.splitlines()
    records = [json.loads(line) for line in lines]
    answers = [(r["custom_id"], r["response"]["body"]["choices"][0]["message"]["content"]) for r in records]
    return sorted(answers, key=lambda pair: int(pair[0].removeprefix("line-")))


def expected(nonces: list[str]) -> list[tuple[str, str]]:
    return [(f"line-{i}", nonce) for i, nonce in enumerate(nonces)]


async def test_a_killed_worker_loses_no_bulk_request_and_no_batch_line(own_server: Server) -> None:
    rng = random.Random(1)
    bulk, chats, lines = ([make_nonce(rng) for _ in range(n)] for n in (48, 16, 150))
    async with make_client(own_server) as client:
        batch_id = await submit_batch(client, lines)

        async def chat(nonce: str) -> str | APIError:
            try:
                return await ask_streamed(client, nonce)
            except APIError as error:  # a clean error is an answer, too; half an answer is not
                return error

        asking = [asyncio.create_task(ask(client, nonce, service_tier="flex")) for nonce in bulk]
        chatting = [asyncio.create_task(chat(nonce)) for nonce in chats]
        await wait_for_lines(client, batch_id, 1)
        own_server.kill("worker")
        assert await asyncio.gather(*asking) == bulk
        for nonce, answer in zip(chats, await asyncio.gather(*chatting), strict=True):
            assert answer == nonce or isinstance(answer, APIError)
        assert await batch_answers(client, batch_id) == expected(lines)
        assert await ask(client, "still-here") == "still-here"
    assert await asyncio.to_thread(own_server.is_ready)


async def test_a_batch_survives_the_death_of_every_part(tmp_path: Path) -> None:
    nonces = [make_nonce(random.Random(i)) for i in range(200)]
    with running(tmp_path) as server:
        server.wait_until_ready()
        async with make_client(server, max_retries=8) as client:
            batch_id = await submit_batch(client, nonces)
            await wait_for_lines(client, batch_id, 1)
            for part in ("gateway", "valkey"):
                server.kill(part)
                await asyncio.to_thread(server.wait_until_ready)
            everything = psutil.Process(server.process.pid).children(recursive=True)
            server.process.kill()
            server.process.wait()
            _, alive = await asyncio.to_thread(psutil.wait_procs, everything, 15)
            assert alive == [], "parts must die with their supervisor"
    with running(tmp_path) as server:
        server.wait_until_ready()
        async with make_client(server) as client:
            assert await batch_answers(client, batch_id) == expected(nonces)


async def test_sigterm_drains_and_exits_zero(own_server: Server) -> None:
    parts = [own_server.pid_of(part) for part in ("valkey", "worker", "gateway")]
    async with make_client(own_server) as client:
        stream = await client.completions.create(
            model=MODEL, prompt="Tidegate", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = aiter(stream)
        await anext(chunks)
        own_server.process.send_signal(signal.SIGTERM)
        reasons = [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length", "a running request is finished"
    assert await asyncio.to_thread(own_server.process.wait, 60) == 0
    assert not any(psutil.pid_exists(pid) for pid in parts)


def test_two_servers_cannot_share_a_data_directory(own_server: Server, tmp_path: Path) -> None:
    with running(tmp_path) as second:
        assert second.process.wait(60) == 78
        assert str(own_server.process.pid) in second.log.read_text()


async def test_parts_run_alone_on_an_existing_store(own_server: Server, tmp_path: Path) -> None:
    """`tidegate gateway` and `tidegate worker` on somebody else's Valkey: here, a running server's."""
    store = ("--redis-url", own_server.socket_url)
    with (
        running(tmp_path / "second", *store, command="gateway") as gateway,
        running(tmp_path / "w", *store, command="worker") as worker,
    ):
        gateway.wait_until_ready()
        workers_url = f"{gateway.root}/ready"
        wait_for(lambda: len(httpx.get(workers_url).json()["workers"]) == 2, 60, "the second worker")
        async with make_client(gateway) as client:
            nonces = [make_nonce(random.Random(i)) for i in range(24)]
            assert await asyncio.gather(*(ask(client, n, service_tier="flex") for n in nonces)) == nonces
        for part in (gateway, worker):
            part.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(part.process.wait, 60) == 0


def test_children_end_with_a_killed_supervisor(own_server: Server) -> None:
    children = psutil.Process(own_server.process.pid).children(recursive=True)
    assert children
    own_server.process.kill()
    own_server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert alive == []


def test_the_second_interrupt_kills_at_once(own_server: Server) -> None:
    for _ in range(2):
        own_server.process.send_signal(signal.SIGINT)
    try:
        own_server.process.wait(20)
    except subprocess.TimeoutExpired:
        pytest.fail("two interrupts did not end it")
