"""A whole server on a store that refuses writes while a batch and a stream run."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from openai import APIError, AsyncOpenAI

from scheduler.store.refusal import CAUSES
from tests.refusals import CODES, limitable_valkey, refusing
from tests.system.server import make_client, running

pytestmark = pytest.mark.timeout(180)

LINES = 300
CHAT = {"model": "tidegate-demo", "messages": [{"role": "user", "content": "Count."}]}


async def start_batch(client: AsyncOpenAI) -> str:
    entry = {"method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "max_tokens": 40}}
    lines = "\n".join(json.dumps({"custom_id": f"line-{i}", **entry}) for i in range(LINES))
    file = await client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return batch.id


async def stream_to_its_end(client: AsyncOpenAI) -> str:
    """Return the last error of a stream; an empty text if it ended well."""
    try:
        body = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
        async for _ in await client.chat.completions.create(stream=True, **CHAT, **body):  # type: ignore[call-overload]
            pass
    except APIError as error:
        return str(error)
    return ""


async def completed_lines(client: AsyncOpenAI, batch_id: str) -> int:
    batch = await client.batches.retrieve(batch_id)
    assert batch.status not in ("failed", "expired", "cancelled")
    assert batch.request_counts is not None
    assert batch.request_counts.failed == 0
    return batch.request_counts.completed


async def test_batches_survive_a_store_that_refuses_writes(tmp_path: Path) -> None:
    with limitable_valkey(tmp_path / "store") as url, running(tmp_path / "data", "--redis-url", url) as server:
        await asyncio.to_thread(server.wait_until_ready)
        worker = server.pid_of("worker")
        async with make_client(server) as client, httpx.AsyncClient(base_url=server.root) as http:
            for code in CODES:
                batch_id = await start_batch(client)
                streaming = asyncio.create_task(stream_to_its_end(client))
                while not await completed_lines(client, batch_id):
                    await asyncio.sleep(0.01)
                with refusing(url, code):
                    assert await completed_lines(client, batch_id) < LINES
                    response = await http.post("/v1/chat/completions", json=CHAT)
                    assert response.status_code == 503
                    assert CAUSES[code] in response.json()["error"]["message"]
                    while (await http.get("/ready")).status_code == 200:
                        await asyncio.sleep(0.05)
                assert await streaming == "" or CAUSES[code] in await streaming
                while await completed_lines(client, batch_id) < LINES:
                    await asyncio.sleep(0.05)
        assert server.pid_of("worker") == worker, "the worker was not started again"
        assert "Traceback" not in server.log.read_text()
