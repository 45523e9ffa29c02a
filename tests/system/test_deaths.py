"""Parts die and clients stay: nothing is lost when a worker, a gateway, the store or everything is killed."""

import asyncio
import io
import json
import random
from pathlib import Path

import psutil
import pytest
from openai import APIError, AsyncOpenAI

from tests.system.nonces import ask, ask_streamed, body, make_nonce
from tests.system.server import Server, make_client, running, wait_for

pytestmark = pytest.mark.timeout(180)


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
    """Return (custom_id, answer) of every output line, in the order of the ids."""
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
    bulk, chats, lines = ([make_nonce(rng) for _ in range(n)] for n in (96, 16, 900))
    async with make_client(own_server) as client:
        batch_id = await submit_batch(client, lines)

        async def chat(nonce: str) -> str | APIError:
            try:
                return await ask_streamed(client, nonce)
            except APIError as error:  # a clean error is allowed, half an answer is not
                return error

        asking = [asyncio.create_task(ask(client, nonce, service_tier="flex")) for nonce in bulk]
        chatting = [asyncio.create_task(chat(nonce)) for nonce in chats]
        await wait_for_lines(client, batch_id, 1)
        killed = own_server.kill("worker")
        counts = (await client.batches.retrieve(batch_id)).request_counts
        assert counts is not None
        assert counts.completed < len(lines), "too late: the batch was done before the kill"
        assert not all(request.done() for request in asking), "too late: bulk was done before the kill"
        # While the new worker loads its engine, the announcement of the dead one must not be taken for it.
        await asyncio.to_thread(wait_for, lambda: not own_server.is_ready(), 15, "the gateway to miss its worker")
        assert await asyncio.gather(*asking) == bulk
        for nonce, answer in zip(chats, await asyncio.gather(*chatting), strict=True):
            assert answer == nonce or isinstance(answer, APIError)
        assert await batch_answers(client, batch_id) == expected(lines)
        assert await ask(client, "still-here") == "still-here"
    await asyncio.to_thread(wait_for, own_server.is_ready, 10, "the gateway to see its new worker")
    assert own_server.pid_of("worker") != killed
    assert psutil.pid_exists(own_server.pid_of("worker"))


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
            assert len(everything) >= 3
            server.process.kill()
            server.process.wait()
            _, alive = await asyncio.to_thread(psutil.wait_procs, everything, 15)
            assert alive == [], "parts must die with their supervisor"
    with running(tmp_path) as server:
        server.wait_until_ready()
        async with make_client(server) as client:
            assert await batch_answers(client, batch_id) == expected(nonces)
