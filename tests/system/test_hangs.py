"""Parts that hang or meet another server: what clients see, with real processes."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from openai import AsyncOpenAI

from tests.system.nonces import MODEL, ask
from tests.system.server import Server, make_client, running, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

PROMPTS = [f"Tidegate {n}" for n in range(4)]
WATCHDOG = "from tidegate import cli, supervisor; supervisor.WATCHDOG_S = {}; cli.main()"  # 15 s in what users run


async def write(client: AsyncOpenAI, prompt: str, begun: asyncio.Semaphore) -> str:
    """Return a long text of the model. `begun` is released at its first token."""
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=200, temperature=1, seed=7, stream=True, extra_body={"ignore_eos": True}
    )
    texts: list[str] = []
    async for chunk in stream:
        if not texts:
            begun.release()
        texts += [choice.text for choice in chunk.choices]
    return "".join(texts)


async def texts_of(client: AsyncOpenAI, server: Server, stopped: int | None = None) -> list[str]:
    """Return a text for each prompt. The process `stopped` is stopped when all of them have begun."""
    begun = asyncio.Semaphore(0)
    writing = [asyncio.create_task(write(client, prompt, begun)) for prompt in PROMPTS]
    for _ in writing:
        await begun.acquire()
    if stopped is not None:
        os.kill(stopped, signal.SIGSTOP)
    return await asyncio.gather(*writing)


async def test_a_worker_that_hangs_is_killed_and_its_successor_serves(tmp_path: Path) -> None:
    patience_s = 8.0
    with running(tmp_path, program=("-c", WATCHDOG.format(patience_s))) as server:
        server.wait_until_ready()
        wait_for(lambda: server.has_logged("all parts are ready"), what="the worker's own report")
        hung, gateway = server.pid_of("worker"), server.pid_of("gateway")
        os.kill(hung, signal.SIGSTOP)
        wait_for(lambda: server.pid_of("worker") != hung, patience_s + 30, "a new worker")
        assert not psutil.pid_exists(hung)
        [line] = [line for line in server.log_lines() if "killing a part that hangs" in str(line["event"])]
        assert (line["part"], line["silent_s"]) == ("worker", patience_s)
        server.wait_until_ready()
        async with make_client(server) as client:
            assert await ask(client, "new-work") == "new-work"
        assert server.pid_of("gateway") == gateway


async def test_streams_of_a_stopped_worker_go_on_at_another_one_and_stay_right_when_it_wakes_up(tmp_path: Path) -> None:
    """The stopped worker's streams have no gap and no repeat, nothing new waits for it, and it may come back.

    The supervisor does not kill it meanwhile, however slow the machine is; and in float32 no batch changes a token.
    """
    exact, patient = ("--dtype", "float32"), ("-c", WATCHDOG.format(300))
    with running(tmp_path / "first", *exact, program=patient) as server:
        await asyncio.to_thread(server.wait_until_ready)
        await check_a_stopped_worker(server, tmp_path / "second", exact)


async def check_a_stopped_worker(server: Server, directory: Path, flags: tuple[str, ...]) -> None:
    worker = server.pid_of("worker")
    async with make_client(server) as client:
        expected = await texts_of(client, server)
        second = ("--redis-url", server.socket_url, "--worker-id", "second", *flags)
        with running(directory, *second, command="worker"):
            await asyncio.to_thread(wait_for, lambda: len(server.workers()) == 2, 60, "the second worker")
            assert await texts_of(client, server, stopped=worker) == expected
            await asyncio.to_thread(wait_for, lambda: server.workers() == ["second"], what="the silence")
            assert await ask(client, "only-second") == "only-second"
            os.kill(worker, signal.SIGCONT)
            await asyncio.to_thread(wait_for, lambda: len(server.workers()) == 2, what="the first worker again")
            assert server.pid_of("worker") == worker
            assert await texts_of(client, server) == expected
