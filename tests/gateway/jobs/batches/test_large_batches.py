"""Batches of many lines: how many there may be, and what a restart holds in memory."""

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.files.store import FileStore
from gateway.jobs.batches.input.lines import input_name, work_folder
from gateway.jobs.batches.lines.results import encode, results_name
from gateway.jobs.batches.model import Batch, BatchStatus, LineResult
from gateway.jobs.batches.store import BatchStore
from gateway.protocol.json_body import INLINE_SIZE, MAX_BODIES
from tests.gateway.offline import MODEL, ScriptedCompletions, ShiftedClock, jsonl, lines, running_gateway
from tests.gateway.stand import Bytes
from tests.waiting import until

LINES, DONE, GROUP = 2000, 1800, 300
ANSWER_BYTES = 20_000  # of a recorded result


async def test_a_batch_with_more_lines_than_the_server_takes_fails(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path, batch_max_lines=3) as gateway:
        assert (await gateway.ended((await gateway.submit(lines(3))).id)).status == "completed"
        batch = await gateway.ended((await gateway.submit(lines(4))).id)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        [error] = batch.errors.data
        assert error.code == "too_many_tasks" and "more than 3 requests" in (error.message or "")


async def test_large_lines_run_as_memory_permits_and_hold_up_no_small_ones(redis_client: Redis, tmp_path: Path) -> None:
    completions = ScriptedCompletions()
    completions.permits = asyncio.Semaphore(0)
    options: Any = {"completions": completions, "max_body_mb": Bytes(INLINE_SIZE + 10_000)}
    async with running_gateway(redis_client, tmp_path, **options) as gateway:
        large = [entry | {"body": entry["body"] | {"user": "x" * INLINE_SIZE}} for entry in lines(MAX_BODIES + 8)]
        first = await gateway.submit(large)
        await until(lambda: completions.running == MAX_BODIES)
        second = await gateway.submit(lines(40))
        await until(lambda: completions.running == MAX_BODIES + 40)
        for _ in range(len(large) + 40):
            completions.permits.release()
        assert [(await gateway.ended(batch.id)).status for batch in (first, second)] == ["completed"] * 2
    assert completions.peak == MAX_BODIES + 40


async def plant_nearly_done(redis: Redis, data_dir: Path) -> str:
    """Record a batch of which the first `DONE` lines have results, as a gateway that died has left it."""
    clock, store, batch_id = ShiftedClock(), BatchStore(redis), "batch_large"
    storage = FileStore(redis, data_dir, clock, 0).storage
    copy = data_dir / input_name(batch_id)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(jsonl(lines(LINES)))
    now_s = clock.wall_ms() // 1000
    status = BatchStatus.IN_PROGRESS
    record = Batch(batch_id, "/v1/chat/completions", "file-1", "24h", status, now_s, now_s + 86_400)
    await store.create(record)
    for field, value in {"total": LINES, "model": f'"{MODEL}"', "in_progress_at": now_s}.items():
        await redis.hset(f"tidegate:batch:{batch_id}", field, value)
    lock = store.owner_lock(batch_id, 60.0)
    assert await lock.acquire()
    token = lock.local.token.decode()
    name, position = results_name(batch_id, "before"), 0
    for first in range(1, DONE, GROUP):
        results = [LineResult(number, True, b'"%s"' % (b"x" * ANSWER_BYTES)) for number in range(first, first + GROUP)]
        data = encode(results)
        await storage.append(name, position, data)
        await store.record(batch_id, name, position, position + len(data), results, token)
        position += len(data)
    await lock.release()
    return batch_id


async def test_a_batch_that_is_nearly_done_goes_on_without_its_results_in_memory(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await plant_nearly_done(redis_client, tmp_path)
    assert (await redis_client.memory_usage(f"tidegate:batches:done:{batch_id}") or 0) < LINES // 8 + 1000
    async with running_gateway(redis_client, tmp_path) as gateway:
        answered_at_reads: list[int] = []
        fetch_appended = gateway.files.storage.fetch_appended

        async def watched(name: str, size: int) -> Path:
            if "/results-" in name:
                answered_at_reads.append(gateway.completions.answered.total())
            return await fetch_appended(name, size)

        monkeypatch.setattr(gateway.files.storage, "fetch_appended", watched)
        tracemalloc.start()
        await until(lambda: not (tmp_path / work_folder(batch_id)).exists(), timeout_s=60.0)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        batch = await gateway.ended(batch_id)
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.completed == LINES
        assert gateway.completions.answered.keys() == {f"q{number}" for number in range(DONE, LINES)}
        assert set(answered_at_reads) == {LINES - DONE}, "results are read when the output is written, and not before"
        assert peak_bytes < DONE * ANSWER_BYTES / 2, "they are copied to the output in chunks"
