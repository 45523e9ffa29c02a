"""Parts die and clients stay: nothing is lost when a worker, a gateway, the store or everything is killed."""

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
from openai import APIError, AsyncOpenAI

from tests.system.nonces import ask, ask_streamed, body, make_nonce
from tests.system.server import Server, make_client, running, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

NUM_LINES = 900


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


class Load:
    """Bulk requests, chats and batches, of which some are always unfinished."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client
        self._rng = random.Random(1)
        self.bulk: dict[str, asyncio.Task[str]] = {}  # by nonce
        self.chats: dict[str, asyncio.Task[str | APIError]] = {}
        self.batches: dict[str, list[str]] = {}  # nonces of the lines, by batch id

    async def is_half_done(self) -> bool:
        """Return whether some bulk requests and some lines of the newest batch have ended, but not all of them.

        Submits more if all have ended.
        """
        if not self.batches or await self._num_completed() == NUM_LINES:
            lines = self._nonces(NUM_LINES)
            self.batches[await submit_batch(self._client, lines)] = lines
        num_lines = await self._num_completed()
        num_done = sum(request.done() for request in self.bulk.values())
        if num_done == len(self.bulk):
            self.bulk |= {n: asyncio.create_task(ask(self._client, n, service_tier="flex")) for n in self._nonces(96)}
            self.chats |= {n: asyncio.create_task(self._chat(n)) for n in self._nonces(16)}
        return 0 < num_lines < NUM_LINES and 0 < num_done < len(self.bulk)

    def _nonces(self, count: int) -> list[str]:
        return [make_nonce(self._rng) for _ in range(count)]

    async def _num_completed(self) -> int:
        counts = (await self._client.batches.retrieve(list(self.batches)[-1])).request_counts
        return counts.completed if counts else 0

    async def _chat(self, nonce: str) -> str | APIError:
        try:
            return await ask_streamed(self._client, nonce)
        except APIError as error:  # a clean error is allowed, half an answer is not
            return error


async def test_a_killed_worker_loses_no_bulk_request_and_no_batch_line(server: Server) -> None:
    async with make_client(server) as client:
        load = Load(client)
        await run_until(server, load.is_half_done)
        killed = server.kill("worker")
        # While the new worker loads its engine, the announcement of the dead one must not be taken for it.
        await asyncio.to_thread(wait_for, lambda: server.pid_of("worker") != killed, what="a new worker")
        os.kill(server.pid_of("worker"), signal.SIGSTOP)  # so that it does not finish loading meanwhile
        await asyncio.to_thread(wait_for, lambda: not server.is_ready(), what="the gateway to miss its worker")
        os.kill(server.pid_of("worker"), signal.SIGCONT)
        assert await asyncio.gather(*load.bulk.values()) == list(load.bulk)
        for nonce, answer in zip(load.chats, await asyncio.gather(*load.chats.values()), strict=True):
            assert answer == nonce or isinstance(answer, APIError)
        for batch_id, lines in load.batches.items():
            assert await batch_answers(client, batch_id) == expected(lines)
        assert await ask(client, "still-here") == "still-here"
    await asyncio.to_thread(wait_for, server.is_ready, what="the gateway to see its new worker")
    assert server.pid_of("worker") != killed
    assert psutil.pid_exists(server.pid_of("worker"))


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
