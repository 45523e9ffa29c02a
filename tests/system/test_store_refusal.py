"""A whole server on a store that refuses writes while a batch and a stream run."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from openai import APIError, AsyncOpenAI

from scheduler.store.errors import CAUSES
from tests.refusals import limitable_valkey, refusing
from tests.system.server import make_client, running

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

LINES = 300
CHAT = {"model": "tidegate-demo", "messages": [{"role": "user", "content": "Count."}]}


async def start_batch(client: AsyncOpenAI) -> str:
    entry = {"method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "max_tokens": 40}}
    lines = "\n".join(json.dumps({"custom_id": f"line-{i}", **entry}) for i in range(LINES))
    file = await client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return batch.id


async def stream_to_its_end(client: AsyncOpenAI, has_begun: asyncio.Event, tokens: int) -> str:
    """Return the error with which a stream ends; an empty text if it ends well."""
    body = {"max_tokens": tokens, "extra_body": {"ignore_eos": True}}
    try:
        patient = client.with_options(max_retries=10)  # on a busy machine, a worker may look silent for a moment
        async for _ in await patient.chat.completions.create(stream=True, **CHAT, **body):  # type: ignore[call-overload]
            has_begun.set()
    except APIError as error:
        return str(error)
    finally:
        has_begun.set()
    return ""


async def completed_lines(client: AsyncOpenAI, batch_id: str) -> int:
    batch = await client.batches.retrieve(batch_id)
    assert batch.status not in ("failed", "expired", "cancelled")
    assert batch.request_counts is not None
    assert batch.request_counts.failed == 0
    return batch.request_counts.completed


async def begin(client: AsyncOpenAI, tokens: int) -> tuple[str, "asyncio.Task[str]"]:
    """Return a batch of which lines have ended, and a stream that has begun."""
    batch_id, has_begun = await start_batch(client), asyncio.Event()
    while not await completed_lines(client, batch_id):
        await asyncio.sleep(0.01)
    streaming = asyncio.create_task(stream_to_its_end(client, has_begun, tokens))
    await has_begun.wait()
    return batch_id, streaming


async def test_batches_survive_a_store_that_refuses_writes_and_streams_end_well_or_with_the_cause(
    tmp_path: Path,
) -> None:
    """First, the store's memory is full for a moment; then its disk is, for longer than a stream waits."""
    with limitable_valkey(tmp_path / "store") as url, running(tmp_path / "data", "--redis-url", url) as server:
        await asyncio.to_thread(server.wait_until_ready)
        worker = server.pid_of("worker")
        async with make_client(server) as client, httpx.AsyncClient(base_url=server.root, timeout=30) as http:
            for code, is_long in (("OOM", False), ("MISCONF", True)):
                while True:
                    batch_id, streaming = await begin(client, 1500 if is_long else 200)
                    with refusing(url, code):
                        if await completed_lines(client, batch_id) == LINES or (is_long and streaming.done()):
                            continue  # the refusal came too late, on a slow machine
                        response = await http.post("/v1/chat/completions", json=CHAT)
                        assert response.status_code == 503
                        assert CAUSES[code] in response.json()["error"]["message"]
                        while (await http.get("/ready")).status_code == 200:
                            await asyncio.sleep(0.05)
                        if is_long:
                            await asyncio.wait([streaming], timeout=30)
                            assert streaming.done()
                    break
                assert (CAUSES[code] in await streaming) if is_long else (await streaming == "")
                while await completed_lines(client, batch_id) < LINES:
                    await asyncio.sleep(0.05)
        assert server.pid_of("worker") == worker, "the worker was not started again"
        assert "Traceback" not in server.log.read_text()
