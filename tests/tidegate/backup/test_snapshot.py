"""A snapshot of the store is of one moment, whatever is written while it is read."""

import asyncio

import pytest
from redis.asyncio import Redis

from scheduler.store import connection
from scheduler.store.keys import Namespace
from tests.waiting import until
from tidegate.backup import snapshot
from tidegate.backup.snapshot import BadSnapshot, is_empty, remove_all, take_snapshot, write_entries

COUNT = 3 * snapshot.READ_GROUP  # several round trips


async def fill(redis: Redis) -> list[str]:
    keys = [f"{Namespace.of(redis).prefix}response:{number}" for number in range(COUNT)]
    await redis.mset(dict.fromkeys(keys, 0))
    return keys


async def write_together(redis: Redis, keys: list[str], written: list[int]) -> None:
    """Set all keys to the same number, and then to the next one, for ever."""
    while True:
        await redis.mset(dict.fromkeys(keys, len(written)))
        written.append(len(written))


async def test_what_is_written_together_is_read_together(redis_client: Redis, valkey_url: str) -> None:
    keys, written = await fill(redis_client), list[int]()
    async with connection.connect(valkey_url) as other:
        writing = asyncio.create_task(write_together(other, keys, written))
        for _snapshot in range(5):
            await writes(written)
            taken = await take_snapshot(redis_client)
            assert len(taken.entries) == COUNT
            assert len({entry.dump for entry in taken.entries}) == 1
        await writes(written)
        writing.cancel()


async def writes(written: list[int]) -> None:
    """Wait until the writer has written some times more."""
    so_far = len(written)
    await until(lambda: len(written) > so_far + 2)


async def test_a_store_that_is_too_slow_to_be_kept_still_is_not_saved(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = await fill(redis_client)
    monkeypatch.setattr(snapshot, "PAUSE_S", 0.0)
    with pytest.raises(BadSnapshot):
        await take_snapshot(redis_client)
    await redis_client.set(keys[0], "1")  # writes do not wait any more


async def test_a_snapshot_is_written_back_as_it_was(redis_client: Redis) -> None:
    prefix = Namespace.of(redis_client).prefix
    await fill(redis_client)
    await redis_client.zadd(f"{prefix}batches", {"a": 1, "b": 2})
    await redis_client.xadd(f"{prefix}response:events:r", {"a": 1})
    taken = await take_snapshot(redis_client)
    await remove_all(redis_client)
    assert await is_empty(redis_client)
    await write_entries(redis_client, taken.entries)
    assert not await is_empty(redis_client)
    again = await take_snapshot(redis_client)
    assert sorted(e.key for e in again.entries) == sorted(e.key for e in taken.entries)
    assert await redis_client.zrange(f"{prefix}batches", 0, -1) == [b"a", b"b"]


async def test_heartbeats_and_waiting_requests_are_left_out_and_tasks_are_not(redis_client: Redis) -> None:
    prefix = Namespace.of(redis_client).prefix
    passing = (
        "queue:bulk",
        "request:r",
        "leases",
        "held:w",
        "workers",
        "worker:w",
        "events:g",
        "gateway:g",
        "cache:x",
        "model:m:tiers",
    )
    lasting = ("tasks:queue:bulk", "tasks:request:t", "tasks:leases", "limits:web", "usage:2026-01-01", "tiers")
    await redis_client.mset({prefix + name: 0 for name in (*passing, *lasting)})
    assert {entry.key for entry in (await take_snapshot(redis_client)).entries} == set(lasting)
