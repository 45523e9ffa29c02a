"""Progress survives a worker's death, and a request that kills its workers is found: real processes, a real store."""

import asyncio
import io
import json
from collections.abc import Iterator

import httpx
import psutil
import pytest
import yaml
from openai import AsyncOpenAI
from redis import Redis

from scheduler.queue.scripts import WRITER_DIGITS
from scheduler.request import WORKER_DIED
from scheduler.store import keys
from tests.system.deadly_worker import DEADLY_PROMPT
from tests.system.nonces import MODEL
from tests.system.server import Server, make_client, running, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

MAX_TOKENS = 1200
NUM_INNOCENT = 6
TIERS = {
    "default_tier": "chat",
    "batch_tier": "batch",
    "tiers": {
        "chat": {"priority": 9, "service_tiers": ["default"], "slo": {"ttft_p99_ms": 500}},
        "bulk": {"priority": 1, "service_tiers": ["flex"]},
        "batch": {"priority": 0, "retry": {"max_attempts": 2}},  # the second attempt runs alone
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("progress")
    tiers = directory / "tiers.yaml"
    tiers.write_text(yaml.safe_dump(TIERS))
    # In bfloat16, a continued sequence may differ, as a preempted one may.
    flags = ("--tiers", str(tiers), "--threads", "1", "--dtype", "float32")
    with running(directory / "data", *flags, program=("-m", "tests.system.deadly_worker")) as own:
        yield own


async def write(client: AsyncOpenAI) -> str:
    """Return a long text of the model."""
    answer = await client.completions.create(
        model=MODEL,
        prompt="Tidegate",
        max_tokens=MAX_TOKENS,
        temperature=1,
        seed=7,
        extra_body={"ignore_eos": True, "service_tier": "flex"},
    )
    return answer.choices[0].text


def wait_until_forgotten(store: "Redis[bytes]") -> None:
    """Wait until no checkpoint is stored: a worker publishes an answer before it acknowledges the request."""
    wait_for(lambda: stored_tokens(store) == 0, timeout_s=60)


OF_REQUESTS, OF_PARTS = "req_*", "[^r]*"  # the names of outputs: ids of requests; hashes, for lines of batches


def stored_tokens(store: "Redis[bytes]", names: str = OF_REQUESTS) -> int:
    """Return the number of checkpointed tokens."""
    return sum((store.strlen(key) - WRITER_DIGITS) // 4 for key in store.keys(keys.OUTPUT_PREFIX + names))


async def test_a_killed_worker_costs_only_the_tokens_since_its_last_checkpoint(server: Server) -> None:
    await asyncio.to_thread(server.wait_until_ready)
    async with make_client(server) as client:
        expected = await write(client)
        with Redis.from_url(server.socket_url) as store:
            await asyncio.to_thread(wait_until_forgotten, store)
            writing = asyncio.create_task(write(client))
            while not writing.done() and not stored_tokens(store):
                await asyncio.sleep(0.01)
            worker = psutil.Process(server.kill("worker"))
            await asyncio.to_thread(psutil.wait_procs, [worker], 30)
            saved = stored_tokens(store)
            assert 0 < saved < MAX_TOKENS
            assert await writing == expected
            await asyncio.to_thread(wait_until_forgotten, store)

    def is_shown() -> bool:
        """Return whether the new worker's metrics, which took the place of the old one's, show what it has saved."""
        restored = server.metric("tidegate_restored_tokens_total", tier="bulk")
        generated = server.metric("tidegate_generation_tokens_total", tier="bulk")
        return (restored, generated) == (saved, MAX_TOKENS - saved)

    await asyncio.to_thread(wait_for, is_shown)


def long_line() -> bytes:
    """Return a line of a batch that asks for what `write` asks for."""
    body = {"model": MODEL, "prompt": "Tidegate", "max_tokens": MAX_TOKENS, "temperature": 1, "seed": 7}
    body["ignore_eos"] = True
    return json.dumps({"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": body}).encode()


def num_batch_tokens(server: Server) -> tuple[float, float]:
    """Return how many tokens of batches the workers have taken from checkpoints, and how many they have generated."""
    names = ("tidegate_restored_tokens_total", "tidegate_generation_tokens_total")
    restored, generated = (server.metric(name, tier="batch") for name in names)
    return restored, generated


async def test_a_line_goes_on_where_it_was_after_its_gateway_was_killed(server: Server) -> None:
    await asyncio.to_thread(server.wait_until_ready)
    async with make_client(server, max_retries=8) as client:
        expected = await write(client)
        with Redis.from_url(server.socket_url) as store:
            store.delete(*store.keys(keys.OUTPUT_PREFIX + OF_PARTS), "none")
            before = num_batch_tokens(server)
            file = await client.files.create(file=("in.jsonl", io.BytesIO(long_line())), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            await asyncio.to_thread(wait_for, lambda: stored_tokens(store, OF_PARTS) > 0)
            saved = stored_tokens(store, OF_PARTS)
            gateway = psutil.Process(server.pid_of("gateway"))
            gateway.kill()
            await asyncio.to_thread(psutil.wait_procs, [gateway], 60)
        await asyncio.to_thread(server.wait_until_ready)
        async with asyncio.timeout(120):
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":
                await asyncio.sleep(0.1)
        assert batch.output_file_id is not None
        [result] = (await client.files.content(batch.output_file_id)).text.splitlines()
    assert json.loads(result)["response"]["body"]["choices"][0]["text"] == expected

    def is_shown() -> bool:
        """Return whether the metrics show that the first gateway's tokens were not generated again."""
        restored, generated = (now - then for now, then in zip(num_batch_tokens(server), before, strict=True))
        # A worker saves what it has when it notices that a gateway is dead.
        return saved <= restored < MAX_TOKENS <= generated <= MAX_TOKENS + 2

    await asyncio.to_thread(wait_for, is_shown)


def num_starts(server: Server) -> int:
    """Return how many workers have been started."""
    return sum(entry["event"] == "started" and entry["part"] == "worker" for entry in server.log_lines())


def line(custom_id: str, prompt: str | tuple[int, ...]) -> bytes:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}).encode()


async def test_a_line_that_kills_its_workers_is_given_up_and_no_other_line_is(server: Server) -> None:
    await asyncio.to_thread(server.wait_until_ready)
    starts = num_starts(server)
    lines = [line("deadly", DEADLY_PROMPT), *(line(f"line-{i}", f"Tidegate {i}") for i in range(NUM_INNOCENT))]
    async with make_client(server, max_retries=8) as client:
        file = await client.files.create(file=("in.jsonl", io.BytesIO(b"\n".join(lines))), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        async with asyncio.timeout(120):
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":
                await asyncio.sleep(0.1)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (NUM_INNOCENT, 1)
        assert batch.error_file_id is not None
        error = json.loads((await client.files.content(batch.error_file_id)).text)
    assert (error["custom_id"], error["response"]["body"]["error"]["code"]) == ("deadly", WORKER_DIED)
    assert num_starts(server) - starts == 2
    [letter] = httpx.get(f"{server.root}/admin/dead-letters", timeout=10).json()["data"]
    assert (letter["batch_id"], letter["custom_id"], letter["attempts"]) == (batch.id, "deadly", 2)
    await asyncio.to_thread(wait_for, lambda: server.metric("tidegate_dead_letters") == 1)
    assert httpx.delete(f"{server.root}/admin/dead-letters/{letter['id']}", timeout=10).status_code == 200
    await asyncio.to_thread(server.wait_until_ready)
