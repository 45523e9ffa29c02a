"""Requests with an `Idempotency-Key`: they run once, and their repetitions get the same answer."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis.asyncio import Redis

from gateway.jobs.idempotency import store
from gateway.jobs.idempotency.store import LEASE_S
from gateway.store_keys import IDEMPOTENCY_S, GatewayKeys
from scheduler.store.errors import NotDurable
from tests.gateway.offline import OfflineGateway, ShiftedClock, jsonl, keyring, lines, running_gateway
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL
from tests.waiting import until

KEY = {"Idempotency-Key": "one"}


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    async with running_gateway(redis_client, tmp_path, keys=keyring(a=None, b=None)) as gateway:
        yield gateway


async def upload(gateway: OfflineGateway, content: bytes = b"{}", headers: dict[str, str] = KEY) -> str:
    file = ("in.jsonl", content)
    return (await gateway.client.files.create(file=file, purpose="batch", extra_headers=headers)).id


async def create(gateway: OfflineGateway, file_id: str, **more: Any) -> str:
    return (await gateway.create(file_id, extra_headers=KEY, **more)).id


async def batch_ids(gateway: OfflineGateway) -> list[str]:
    return [batch.id async for batch in await gateway.client.batches.list()]


async def test_a_repeated_batch_is_created_and_run_once(gateway: OfflineGateway) -> None:
    one = gateway.as_key("a")
    file_id = await one.upload(jsonl(lines(3)))
    batch_id = await create(one, file_id)
    assert await create(one, file_id) == batch_id
    await one.ended(batch_id)
    assert await create(one, file_id) == batch_id, "also after its end"
    assert await batch_ids(one) == [batch_id]
    assert set(gateway.completions.calls.values()) == {1}


async def test_another_body_or_endpoint_with_the_same_key_is_refused(gateway: OfflineGateway) -> None:
    one = gateway.as_key("a")
    file_id = await one.upload(jsonl(lines(1)))
    await create(one, file_id)
    for other in (create(one, file_id, metadata={"n": "2"}), upload(one)):
        with pytest.raises(openai.UnprocessableEntityError, match="Use a new key") as refused:
            await other
        assert refused.value.code == "idempotency_key_reused"
    assert len(await batch_ids(one)) == 1


async def test_an_owner_with_too_many_bytes_of_answers_loses_the_oldest(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_ANSWER_BYTES", 250)
    clock = ShiftedClock()
    idempotency, runs = store.IdempotencyStore(redis_client, clock), list[str]()

    async def ask(key: str, owner: str | None = "ann", size: int = 100) -> bool:
        async def execute(new_id: str) -> bytes:
            runs.append(key)
            return b"x" * size

        clock.shift_s += 1
        outcome = await idempotency.run(key, owner, "body", execute)
        assert outcome is not None and outcome.answer == b"x" * size
        return outcome.is_replayed

    assert [await ask(key) for key in ("a", "b", "c")] == [False] * 3
    assert [await ask(key) for key in ("b", "c")] == [True] * 2, "the newest are kept"
    assert not await ask("a"), "it was forgotten"
    assert not await ask("d", size=1000) and await ask("d", size=1000), "one answer is kept, however large"
    assert not await ask("b", "ben") and await ask("b", "ben"), "others have room of their own"
    clock.shift_s += IDEMPOTENCY_S
    records = [key async for key in redis_client.scan_iter(f"{GatewayKeys.of(redis_client).idempotency}*")]
    await redis_client.delete(*records)  # as if it were a day later
    assert [await ask(key) for key in ("e", "f")] == [False] * 2
    assert [await ask(key) for key in ("e", "f")] == [True] * 2, "what has expired does not count"


async def test_a_key_belongs_to_one_caller(gateway: OfflineGateway) -> None:
    a, b = gateway.as_key("a"), gateway.as_key("b")
    assert await upload(a) != await upload(b)


async def test_a_key_works_again_after_an_error(gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    one = gateway.as_key("a")
    with pytest.raises(openai.BadRequestError):
        await create(one, "file-unknown")
    file_id = await one.upload(jsonl(lines(1)))

    async def unconfirmed(*_: Any) -> bool:
        raise NotDurable

    with monkeypatch.context() as slow_disk:
        slow_disk.setattr("gateway.jobs.batches.store.durable", unconfirmed)
        with pytest.raises(openai.InternalServerError):
            await create(one, file_id)
    assert [await create(one, file_id)] == await batch_ids(one)


async def test_answers_survive_a_restart_and_are_forgotten_after_a_day(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path) as gateway:
        file_id = await upload(gateway)
    async with running_gateway(redis_client, tmp_path) as gateway:
        assert await upload(gateway) == file_id
    [record] = [key async for key in redis_client.scan_iter(f"{GatewayKeys.of(redis_client).idempotency}*")]
    assert 86_300 < await redis_client.ttl(record) <= 86_400


async def test_a_batch_that_was_created_before_a_crash_is_found_again(
    gateway: OfflineGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway dies after the batch is there, and before its answer is kept."""
    one = gateway.as_key("a")
    file_id = await one.upload(jsonl(lines(1)))

    async def lost(*_: Any) -> None:
        pass

    with monkeypatch.context() as crash:
        crash.setattr(store.IdempotencyStore, "_end", lost)
        batch_id = await create(one, file_id)
    with pytest.raises(openai.ConflictError, match="still running") as refused:
        await create(one, file_id)
    assert refused.value.code == "idempotency_key_in_use"
    assert refused.value.response.headers["retry-after"] == "1"
    assert isinstance(gateway.clock, ShiftedClock)
    gateway.clock.shift_s = int(LEASE_S) + 1
    assert await create(one, file_id) == batch_id
    assert await batch_ids(one) == [batch_id]


async def test_a_long_request_keeps_its_lease(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ShiftedClock()
    monkeypatch.setattr(store, "RENEW_S", 0.001)
    idempotency, gate = store.IdempotencyStore(redis_client, clock), asyncio.Event()

    async def execute(new_id: str) -> bytes:
        await gate.wait()
        return new_id.encode()

    running = asyncio.create_task(idempotency.run("k", None, "f", execute))
    await until(lambda: _has_record(redis_client))
    clock.shift_s = int(LEASE_S) - 1
    [record] = [key async for key in redis_client.scan_iter(f"{GatewayKeys.of(redis_client).idempotency}*")]
    before = int(await redis_client.hget(record, "lease_ms") or 0)
    await until(lambda: _is_later(redis_client, record, before))
    clock.shift_s = int(LEASE_S) + 1
    with pytest.raises(Exception, match="still running"):
        await idempotency.run("k", None, "f", execute)
    gate.set()
    first, again = await running, await idempotency.run("k", None, "f", execute)
    assert first is not None and again is not None
    assert (first.answer, again.answer, again.is_replayed) == (again.answer, first.answer, True)


async def _has_record(redis: Redis) -> bool:
    return bool([key async for key in redis.scan_iter(f"{GatewayKeys.of(redis).idempotency}*")])


async def _is_later(redis: Redis, record: bytes, before: int) -> bool:
    return int(await redis.hget(record, "lease_ms") or 0) > before


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_of_a_wrong_length_is_refused(gateway: OfflineGateway, key: str) -> None:
    with pytest.raises(openai.BadRequestError, match="from 1 to 255 characters"):
        await upload(gateway.as_key("a"), headers={"Idempotency-Key": key})


@pytest.fixture
async def stand(redis_client: Redis) -> AsyncIterator[Stand]:
    async with running_stand(redis=redis_client) as stand:
        yield stand


async def respond(stand: Stand, **more: Any) -> httpx.Response:
    return await stand.post("/v1/responses", {"model": MODEL, "input": "hi", **more}, headers=KEY)


async def test_a_repeated_response_is_generated_once(stand: Stand) -> None:
    first, second = await respond(stand), await respond(stand)
    assert first.status_code == 200
    assert first.json() == second.json()
    assert len(stand.worker.served) == 1
    assert (await respond(stand, temperature=0.5)).status_code == 422


async def test_a_plain_stream_with_a_key_is_refused_with_the_way_out(stand: Stand) -> None:
    refused = await respond(stand, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert "'background'" in refused.json()["error"]["message"]
    assert stand.worker.served == []
