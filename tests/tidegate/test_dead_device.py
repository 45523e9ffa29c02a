"""A device that fails under a worker: the process ends with 1, and the next one does its work."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from engine.interface import SamplingParams
from scheduler.client.client import SchedulerClient
from scheduler.client.token_stream import TokenStream
from scheduler.clock import SystemClock
from scheduler.config import load_tiers
from scheduler.events.redis import RedisEventChannel
from scheduler.queue.redis import RedisQueue
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.request import Request, TokenEvent
from tests.waiting import until
from tidegate.settings.worker import WorkerSettings

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]

# The shipped worker with two changes: it serves only when told to, and its device fails after a number of steps with
# requests.
WORKER = """
import asyncio
import sys
from engine.native.execution.model_runner import ModelRunner
from tidegate.worker import engine_worker as worker
from tidegate.settings.worker import WorkerSettings

url, steps_left = sys.argv[1], float(sys.argv[2])
teach, run = worker.teach, ModelRunner.run

def run_until_it_breaks(self, batch, **more):
    global steps_left
    steps_left -= 1
    if steps_left < 0:
        raise RuntimeError("CUDA error: unspecified launch failure")
    return run(self, batch, **more)

async def teach_then_count(*args):
    await teach(*args)
    await asyncio.to_thread(sys.stdin.readline)
    ModelRunner.run = run_until_it_breaks

worker.teach = teach_then_count
settings = WorkerSettings(redis_url=url, worker_id="w", dtype="float32", device="cpu", threads=1)
sys.exit(worker.run_worker(settings))
"""


@asynccontextmanager
async def worker(url: str, steps: float) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WORKER,
        url,
        str(steps),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        process.stdin.close()
        await process.wait()


def serve(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"serve\n")


@asynccontextmanager
async def client_of(redis: Redis) -> AsyncIterator[SchedulerClient]:
    clock = SystemClock()
    tiers = load_tiers(WorkerSettings().tiers_path)
    parts = RedisQueue(redis, clock), RedisEventChannel(redis), RedisWorkerRegistry(redis)
    client = SchedulerClient(*parts, tiers, clock, "gateway")
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def make_request(request_id: str) -> Request:
    now_ms = SystemClock().wall_ms()
    sampling = SamplingParams(max_tokens=80, ignore_eos=True, seed=3, repetition_penalty=1.1)
    # In the bulk tier, because an interactive request would not wait for the next worker.
    return Request(request_id, "bulk", tuple(range(20, 40)), sampling, now_ms, now_ms + 60_000, "gateway")


async def submit(client: SchedulerClient, request: Request) -> TokenStream:
    generation = await client.submit([request])
    assert isinstance(generation, TokenStream)
    return generation


@pytest.mark.trap(16)
async def test_the_worker_exits_with_1_and_the_next_one_does_its_work(valkey_url: str, redis_client: Redis) -> None:
    """Trap 16."""
    events: list[TokenEvent] = []
    async with (
        client_of(redis_client) as client,
        worker(valkey_url, steps=30) as dying,
        worker(valkey_url, steps=float("inf")) as heir,
    ):
        serve(dying)
        await until(lambda: bool(client.live.engines), 60)
        generation = await submit(client, make_request("r"))
        assert await asyncio.wait_for(dying.wait(), 60) == 1
        serve(heir)
        async with generation as stream:
            async for event in stream:
                events.append(event)
        async with await submit(client, make_request("again")) as stream:
            undisturbed = [token_id async for event in stream for token_id in event.token_ids]
        heir.terminate()
        assert await asyncio.wait_for(heir.wait(), 60) == 0
    assert 0 < events[0].index + len(events[0].token_ids) < 80
    assert [token_id for event in events for token_id in event.token_ids] == undisturbed
    assert len(undisturbed) == 80
