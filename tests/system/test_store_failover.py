"""A whole server behind a Sentinel, whose primary dies or stands still while chats, a stream and a batch run."""

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest
from openai import APIError, AsyncOpenAI

from tests.scheduler.store.nodes import Pair, running_sentinel, server_pair
from tests.system.server import make_client, running
from tests.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

LINES = 300
LONGEST_S = 20.0  # of a chat, and from a promotion to the next answer; usually two to five, but machines may be busy
CHAT = {"model": "tidegate-demo", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 8}


async def start_batch(client: AsyncOpenAI) -> str:
    entry = {"method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "max_tokens": 40}}
    lines = "\n".join(json.dumps({"custom_id": f"line-{i}", **entry}) for i in range(LINES))
    file = await client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return batch.id


async def completed_lines(client: AsyncOpenAI, batch_id: str) -> int:
    counts = (await client.batches.retrieve(batch_id)).request_counts
    return 0 if counts is None else counts.completed


async def chat_until(client: AsyncOpenAI, is_over: asyncio.Event) -> list[tuple[float, float, int]]:
    """Chat until the first success after `is_over`. Return (begin, end, status) of each attempt."""
    attempts = []
    while True:
        was_over, begun, status = is_over.is_set(), time.monotonic(), 200
        try:
            await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        except APIError as error:
            status = getattr(error, "status_code", 0)
        attempts.append((begun, time.monotonic(), status))
        if was_over and status == 200:
            return attempts
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_failover_costs_seconds_of_503_and_no_line_of_a_batch(tmp_path: Path, number: int) -> None:
    with server_pair(tmp_path) as pair:
        await pair.start()
        async with running_sentinel(tmp_path, pair) as sentinel:
            flags = ("--redis-url", sentinel.url, "--store-replicas", "1")
            with running(tmp_path / "data", *flags) as server:
                await asyncio.to_thread(server.wait_until_ready)
                async with make_client(server) as client:
                    await fail_over(pair, client, number)
                assert "Traceback" not in server.log.read_text()


async def fail_over(pair: Pair, client: AsyncOpenAI, number: int) -> None:
    batch_id, is_over = await start_batch(client), asyncio.Event()
    while not await completed_lines(client, batch_id):
        await asyncio.sleep(0.01)
    chatting = asyncio.create_task(chat_until(client, is_over))
    old = pair.primary
    old.send(number)
    await until(lambda: pair.replica.ask("ROLE")[0] == b"master")
    promoted_s = time.monotonic()
    is_over.set()
    attempts = await chatting
    assert {status for _, _, status in attempts} <= {200, 503}
    assert max(end - begin for begin, end, _ in attempts) < LONGEST_S
    assert attempts[-1][1] - promoted_s < LONGEST_S
    if number == signal.SIGSTOP:
        old.send(signal.SIGCONT)
    else:
        old.end()
        await old.start()
    while (batch := await client.batches.retrieve(batch_id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        await asyncio.sleep(0.1)
    assert batch.output_file_id is not None
    output = (await client.files.content(batch.output_file_id)).text
    ids = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert sorted(ids) == sorted(f"line-{i}" for i in range(LINES))
