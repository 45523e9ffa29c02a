"""Bad things that happen to a batch while it runs: each has its outcome, and nothing that was finished is lost."""

import asyncio
import errno
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from gateway.files import local_storage
from gateway.files.object_storage import ObjectStorage
from gateway.jobs.batches.lines import recorder
from gateway.jobs.batches.run import LOST_S
from tests.gateway.offline import OfflineGateway, ScriptedCompletions, jsonl, lines, running_gateway
from tests.waiting import until

DAY_S = 86_400


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    async with running_gateway(redis_client, tmp_path) as gateway:
        yield gateway


async def half_done(gateway: OfflineGateway) -> str:
    """Start a batch of ten lines, of which five are recorded and five wait for permits. Return its id."""
    gateway.completions.permits = asyncio.Semaphore(5)
    created = await gateway.submit(lines(10))
    await gateway.answered(created.id, 5)
    await until(lambda: gateway.completions.running == 5)
    return created.id


def release(completions: ScriptedCompletions, count: int) -> None:
    assert completions.permits is not None
    for _ in range(count):
        completions.permits.release()


@pytest.mark.parametrize("backlog_bytes", [1, recorder.BACKLOG_BYTES])
async def test_a_disk_that_is_full_while_results_are_written(
    gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch, backlog_bytes: int
) -> None:
    monkeypatch.setattr(recorder, "BACKLOG_BYTES", backlog_bytes)
    monkeypatch.setattr(recorder, "RETRY_S", 0.001)
    batch_id, pwrite, attempts = await half_done(gateway), os.pwrite, 0

    def fill(handle: int, data: bytes, position: int) -> int:
        nonlocal attempts
        attempts += 1
        if attempts % 2:
            return pwrite(handle, data[:7], position)
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as full:
        full.setattr(local_storage.os, "pwrite", fill)
        release(gateway.completions, 5)
        await until(lambda: attempts >= 10)
        batch = await gateway.client.batches.retrieve(batch_id)
        assert batch.status == "in_progress" and batch.request_counts is not None
        assert batch.request_counts.completed == 5
    batch = await gateway.ended(batch_id)
    assert batch.status == "completed"
    assert [entry["custom_id"] for entry in await gateway.read(batch.output_file_id)] == [f"q{n}" for n in range(10)]
    assert set(gateway.completions.calls.values()) == {1}, "no line was computed twice"


async def test_results_leave_half_of_the_disk_s_reserve_to_the_store(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "RETRY_S", 0.001)
    async with running_gateway(redis_client, tmp_path, disk_reserve_mb=2) as gateway:
        batch_id, looks, free = await half_done(gateway), 0, 2**20 - 1

        def usage(path: object) -> SimpleNamespace:
            nonlocal looks
            looks += 1
            return SimpleNamespace(free=free)

        monkeypatch.setattr(shutil, "disk_usage", usage)
        release(gateway.completions, 5)
        await until(lambda: looks >= 10)
        batch = await gateway.client.batches.retrieve(batch_id)
        assert batch.request_counts is not None and batch.request_counts.completed == 5
        assert f"results of batch {batch_id} wait: no more than the reserve of the disk is free" in caplog.messages
        free = 2 * 2**20
        batch = await gateway.ended(batch_id)
    assert batch.status == "completed" and set(gateway.completions.calls.values()) == {1}


async def test_results_in_an_object_store_need_no_disk_of_the_gateway(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(f"memory://{secrets.token_hex(4)}", tmp_path)
    storage.collect_s = 0.0
    async with running_gateway(redis_client, tmp_path, storage=storage, disk_reserve_mb=2) as gateway:
        batch_id = await half_done(gateway)
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
            release(gateway.completions, 4)
            await gateway.answered(batch_id, 9)
        release(gateway.completions, 1)
        assert (await gateway.ended(batch_id)).status == "completed"


async def test_an_input_that_was_damaged_on_the_disk_fails_the_batch(gateway: OfflineGateway) -> None:
    file_id = await gateway.upload(jsonl(lines(3)))
    path = gateway.files.data_dir / "files" / file_id
    path.write_bytes(path.read_bytes().replace(b"q1", b"q7"))
    batch = await gateway.ended((await gateway.create(file_id)).id)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["input_damaged"]
    assert not gateway.completions.calls


async def test_the_batch_s_own_copy_is_lost_while_it_runs(
    redis_client: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was read goes on; a later run waits for the copy, and keeps the results when it gives up."""
    async with running_gateway(redis_client, tmp_path) as gateway:
        batch_id = await half_done(gateway)
        copy = tmp_path / "batches" / batch_id / "input.jsonl"
        copy.unlink()
        release(gateway.completions, 1)
        await gateway.answered(batch_id, 6)
    async with running_gateway(redis_client, tmp_path) as gateway:
        gateway.clock.shift_s = DAY_S + LOST_S - 60
        await until(lambda: f"batch {batch_id} waits" in caplog.text)
        assert (await gateway.client.batches.retrieve(batch_id)).status == "in_progress"
        assert not gateway.completions.calls
    async with running_gateway(redis_client, tmp_path) as gateway:
        gateway.clock.shift_s = DAY_S + LOST_S + 1
        batch = await gateway.ended(batch_id)
        assert batch.status == "expired" and batch.errors is not None and batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["input_lost"]
        assert len(await gateway.read(batch.output_file_id)) == 6


@pytest.mark.parametrize("jump_s", [-7200, 7200])
async def test_a_clock_that_jumps_within_the_window(gateway: OfflineGateway, jump_s: int) -> None:
    batch_id = await half_done(gateway)
    gateway.clock.shift_s = jump_s
    release(gateway.completions, 5)
    batch = await gateway.ended(batch_id)
    assert batch.status == "completed" and len(await gateway.read(batch.output_file_id)) == 10
