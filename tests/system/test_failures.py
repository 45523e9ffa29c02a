"""Nothing is lost when a worker, a gateway, the store or everything is killed while clients wait."""

import asyncio
import contextlib
import io
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from openai import APIConnectionError, APIError, AsyncOpenAI

from tests.system.nonces import MODEL, ask, ask_streamed, body, make_nonce
from tests.system.server import Server, running, wait_for
from tidegate.valkey import running_valkey

pytestmark = pytest.mark.timeout(180)

SLA_STREAM = "/admin/sla/stream"


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


def test_two_servers_share_a_store_and_survive_its_outage(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ending:
        store = ending.enter_context(contextlib.ExitStack())
        url = store.enter_context(running_valkey(tmp_path / "store"))
        servers = [ending.enter_context(running(tmp_path / name, "--redis-url", url)) for name in ("a", "b")]
        for server in servers:
            server.wait_until_ready()
        wait_for(lambda: all(len(set(server.workers())) == 2 for server in servers), 30, "two workers")
        before = [server.pid_of("worker") for server in servers]
        store.close()
        for pid in before:
            with contextlib.suppress(ProcessLookupError):  # the worker may have ended by itself
                os.kill(pid, signal.SIGKILL)
        wait_for(
            lambda: all(server.has_logged("the readiness of a part cannot be checked") for server in servers),
            30,
            "the probes",
        )
        assert not set(before) & {server.pid_of("worker") for server in servers}
        ending.enter_context(running_valkey(tmp_path / "store"))
        for server in servers:
            server.wait_until_ready()
            server.process.send_signal(signal.SIGTERM)
        assert [server.process.wait(60) for server in servers] == [0, 0]


async def test_the_second_interrupt_kills_at_once(own_server: Server) -> None:
    async with make_client(own_server) as client, long_streams(client, 48, asyncio.Event()):
        own_server.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(wait_for, lambda: own_server.has_logged("stopping"), 10, "the drain")
        own_server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(own_server.process.wait, 5) == 1
