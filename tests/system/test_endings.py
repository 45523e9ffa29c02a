"""How servers and their parts end: by draining, at once, or because another server has the data directory."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from openai import APIConnectionError, APIError, AsyncOpenAI

from tests.system.nonces import MODEL, ask, make_nonce
from tests.system.server import Server, make_client, running, wait_for

pytestmark = pytest.mark.timeout(180)

SLA_STREAM = "/admin/sla/stream"


async def stream_to_its_end(
    client: AsyncOpenAI, max_tokens: int, started: asyncio.Semaphore, goes_on: asyncio.Event | None = None
) -> str | APIError | None:
    """The last finish reason, or the error that the server sent instead. `started` counts first tokens; what follows
    them is read once `goes_on` is set."""
    reasons: list[str | None] = []
    try:
        stream = await client.completions.create(
            model=MODEL, prompt="Tidegate", max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            if not reasons:
                started.release()
                if goes_on is not None:
                    await goes_on.wait()
            reasons += [choice.finish_reason for choice in chunk.choices]
    except APIError as error:
        return error
    return reasons[-1]


@asynccontextmanager
async def long_streams(
    client: AsyncOpenAI, num: int, go_on: asyncio.Event | None = None
) -> AsyncIterator[list["asyncio.Task[str | APIError | None]"]]:
    """Streams that take much longer than a test. They are cancelled at the end.

    With `go_on`, the streams are not read before it is set: reading so many takes as long as generating them.
    """
    started = asyncio.Semaphore(0)
    streams = [asyncio.create_task(stream_to_its_end(client, 1900, started, go_on)) for _ in range(num)]
    try:
        async with asyncio.timeout(30):
            for _ in range(num):
                await started.acquire()
        yield streams
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def ended_by_the_server(answer: str | APIError | None) -> bool:
    """Whether the answer is complete, or an error that the server sent, not a broken connection."""
    return answer == "length" or (isinstance(answer, APIError) and not isinstance(answer, APIConnectionError))


async def test_sigterm_drains_and_exits_zero(tmp_path: Path) -> None:
    """Requests that end in time end normally. The others get an error, not a closed connection."""
    with running(tmp_path, "--drain-s", "4") as server:
        server.wait_until_ready()
        parts = [server.pid_of(part) for part in ("valkey", "worker", "gateway")]
        go_on = asyncio.Event()
        async with make_client(server) as client, long_streams(client, 48, go_on) as streams:
            short_started = asyncio.Semaphore(0)
            short = asyncio.create_task(stream_to_its_end(client, 20, short_started))
            await short_started.acquire()
            async with httpx.AsyncClient(base_url=server.root) as watcher, watcher.stream("GET", SLA_STREAM) as feed:
                events = feed.aiter_lines()
                assert await anext(events) == "event: sla"
                server.process.send_signal(signal.SIGTERM)
                assert await short == "length", "a running request is finished"
                assert "data" in {line.partition(":")[0] async for line in events}, "the live feed ends by itself"
            go_on.set()
            answers = await asyncio.gather(*streams)
        assert all(ended_by_the_server(answer) for answer in answers)
        assert any(isinstance(answer, APIError) for answer in answers), "no request was left at the end of the drain"
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert not any(psutil.pid_exists(pid) for pid in parts)


def test_two_servers_cannot_share_a_data_directory(server: Server) -> None:
    with running(server.data_dir) as second:
        assert second.process.wait(60) == 78
        assert str(server.process.pid) in second.log.read_text()
    assert server.is_ready()


async def test_parts_run_alone_on_an_existing_store(server: Server, tmp_path: Path) -> None:
    """`tidegate gateway` and `tidegate worker` on the Valkey of a running server, which they do not disturb."""
    store = ("--redis-url", server.socket_url)
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
            go_on = asyncio.Event()
            async with long_streams(client, 16, go_on) as streams:
                gateway.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(wait_for, lambda: not gateway.is_listening(), 10, "the gateway to drain")
                gateway.process.send_signal(signal.SIGTERM)  # at once, not after 30 s
                assert await asyncio.to_thread(gateway.process.wait, 15) == 0
                go_on.set()
                answers = await asyncio.gather(*streams)
        assert all(ended_by_the_server(answer) for answer in answers)
        assert any(isinstance(answer, APIError) for answer in answers), "no request was cut short"
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.process.wait, 60) == 0
    assert server.is_ready() and len(server.workers()) == 1


async def test_the_second_interrupt_kills_at_once(own_server: Server) -> None:
    async with make_client(own_server) as client, long_streams(client, 48, asyncio.Event()):
        own_server.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(wait_for, lambda: own_server.has_logged("stopping"), 10, "the drain")
        own_server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(own_server.process.wait, 5) == 1
