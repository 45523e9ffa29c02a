"""Parts die one after another, and then all at once: a batch loses nothing. `python -m bench chaos` has more faults."""

import asyncio
import io
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from openai import AsyncOpenAI

from tests.system.nonces import body, make_nonce
from tests.system.server import Server, make_client, running

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


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


async def run_until(server: Server, condition: Callable[[], Awaitable[bool]]) -> None:
    """Let the worker run in short slices until `condition`, which is checked while the worker is stopped.

    The worker is left stopped, so the condition still holds afterwards.
    """
    worker = server.pid_of("worker")
    async with asyncio.timeout(90):
        while True:
            os.kill(worker, signal.SIGSTOP)
            if await condition():
                return
            os.kill(worker, signal.SIGCONT)
            await asyncio.sleep(0.02)


async def test_a_batch_survives_the_death_of_every_part(tmp_path: Path) -> None:
    nonces = [make_nonce(random.Random(i)) for i in range(200)]
    with running(tmp_path) as server:
        server.wait_until_ready()
        async with make_client(server, max_retries=8) as client:
            batch_id = await submit_batch(client, nonces)

            async def is_running() -> bool:
                batch = await client.batches.retrieve(batch_id)
                counts = batch.request_counts
                return batch.status == "in_progress" and counts is not None and counts.completed < len(nonces)

            await run_until(server, is_running)
            for part in ("gateway", "valkey"):
                server.kill(part)
                os.kill(server.pid_of("worker"), signal.SIGCONT)
                await asyncio.to_thread(server.wait_until_ready)
            everything = psutil.Process(server.process.pid).children(recursive=True)
            assert len(everything) >= 3
            server.process.kill()
            server.process.wait()
            _, alive = await asyncio.to_thread(psutil.wait_procs, everything, 30)
            assert alive == [], "parts must die with their supervisor"
    with running(tmp_path) as server:
        server.wait_until_ready()
        async with make_client(server) as client:
            assert await batch_answers(client, batch_id) == expected(nonces)
