"""A store that loses what it had answered last, or does not confirm that it is on its disk."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import openai
import pytest
from redis.asyncio import Redis

from gateway.store_keys import GatewayKeys
from scheduler.store.durability import durable
from scheduler.store.errors import NotDurable
from tests.gateway.offline import OfflineGateway, jsonl, lines, running_gateway
from tests.waiting import until

Undo = Callable[[], Awaitable[bool]]  # loses a write; False if it has not come yet
Lose = Callable[[str, Undo], None]


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    async with running_gateway(redis_client, tmp_path) as gateway:
        yield gateway


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Lose:
    """Return a function that takes a module and what is lost, once, when the module waits for the disk."""

    def lose(module: str, undo: Undo) -> None:
        has_crashed = False

        async def durable_after_crash(redis: Redis, key: str | None = None) -> bool:
            nonlocal has_crashed
            has_crashed = has_crashed or await undo()
            return await durable(redis, key)

        monkeypatch.setattr(f"{module}.durable", durable_after_crash)

    return lose


async def delete_all(redis: Redis, pattern: str) -> bool:
    found = await redis.keys(pattern)
    return bool(found and await redis.delete(*found))


LOST, UNCONFIRMED = "lost what it had taken last", "disk is too slow or full"


@pytest.mark.parametrize("said", [LOST, UNCONFIRMED])
async def test_an_upload_that_is_not_durable_is_refused_and_leaves_nothing(
    gateway: OfflineGateway, redis_client: Redis, lose: Lose, said: str
) -> None:
    async def undo() -> bool:
        if said is UNCONFIRMED:
            raise NotDurable
        return await delete_all(redis_client, f"{GatewayKeys.of(redis_client).prefix}file:*")

    lose("gateway.files.store", undo)
    with pytest.raises(openai.InternalServerError, match=said) as refused:
        await gateway.upload(b"{}")
    assert refused.value.status_code == 503 and int(refused.value.response.headers["retry-after"]) >= 1
    assert [path for name in ("files", "incoming") for path in (gateway.files.data_dir / name).iterdir()] == []
    assert [file.id async for file in gateway.client.files.list()] == []
    assert said is LOST or await gateway.files.used_bytes(None) == 0


@pytest.mark.parametrize("said", [LOST, UNCONFIRMED])
async def test_a_batch_that_is_not_durable_is_refused_and_neither_runs_nor_leaves_anything(
    gateway: OfflineGateway, redis_client: Redis, lose: Lose, said: str
) -> None:
    async def undo() -> bool:
        if said is UNCONFIRMED:
            raise NotDurable
        return await delete_all(redis_client, GatewayKeys.of(redis_client).batch("*"))

    file_id = await gateway.upload(jsonl(lines(2)))
    lose("gateway.jobs.batches.store", undo)
    with pytest.raises(openai.InternalServerError, match=said):
        await gateway.create(file_id)
    assert [batch.id async for batch in gateway.client.batches.list()] == []
    assert list((gateway.files.data_dir / "batches").iterdir()) == [] and not gateway.completions.calls
    assert said is LOST or set((await gateway.batches.counts_by_status()).values()) == {0}


async def test_a_batch_whose_end_is_lost_ends_again_with_all_its_lines(
    gateway: OfflineGateway, redis_client: Redis, lose: Lose
) -> None:
    gateway.completions.permits = asyncio.Semaphore(0)
    batch_id = (await gateway.submit(lines(3))).id
    record, undone = GatewayKeys.of(redis_client).batch(batch_id), asyncio.Event()

    async def undo() -> bool:
        if await redis_client.hget(record, "status") != b"completed":
            return False
        await redis_client.hset(record, "status", "finalizing")
        await redis_client.hdel(record, "completed_at", "output_file_id")
        undone.set()
        return True

    lose("gateway.jobs.batches.store", undo)
    for _ in range(3):
        gateway.completions.permits.release()
    await undone.wait()
    batch = await gateway.ended(batch_id)
    assert batch.status == "completed"
    assert len(await gateway.read(batch.output_file_id)) == 3
    assert await redis_client.smembers(GatewayKeys.of(redis_client).batches_unfinished) == set()


async def test_a_cancellation_that_is_lost_is_refused_and_may_be_repeated(
    gateway: OfflineGateway, redis_client: Redis, lose: Lose
) -> None:
    gateway.completions.permits = asyncio.Semaphore(0)
    batch_id = (await gateway.submit(lines(2))).id
    await until(lambda: gateway.completions.running == 2)

    async def undo() -> bool:
        if await redis_client.hget(GatewayKeys.of(redis_client).batch(batch_id), "status") != b"cancelling":
            return False
        await redis_client.hset(GatewayKeys.of(redis_client).batch(batch_id), "status", "in_progress")
        return True

    lose("gateway.jobs.batches.store", undo)
    with pytest.raises(openai.InternalServerError, match="lost what it had taken last"):
        await gateway.client.batches.cancel(batch_id)
    await gateway.client.batches.cancel(batch_id)
    assert (await gateway.ended(batch_id)).status == "cancelled"
