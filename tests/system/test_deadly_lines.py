"""A line of a batch that kills its workers is given up: real processes, a real store."""

import asyncio
import io
import json
from collections.abc import Iterator

import httpx
import pytest
import yaml

from scheduler.request import WORKER_DIED
from tests.system.deadly_worker import DEADLY_PROMPT
from tests.system.nonces import MODEL
from tests.system.server import Server, make_client, running, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

NUM_INNOCENT = 6
TIERS = {
    "default_tier": "chat",
    "batch_tier": "batch",
    "tiers": {
        "chat": {"priority": 9, "service_tiers": ["default"], "slo": {"ttft_p99_ms": 500}},
        "batch": {"priority": 0, "retry": {"max_attempts": 2}},  # the second attempt runs alone
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("deadly")
    tiers = directory / "tiers.yaml"
    tiers.write_text(yaml.safe_dump(TIERS))
    flags = ("--tiers", str(tiers), "--threads", "1")
    with running(directory / "data", *flags, program=("-m", "tests.system.deadly_worker")) as own:
        yield own


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
