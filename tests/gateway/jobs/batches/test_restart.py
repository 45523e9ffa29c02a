"""A batch survives its gateway: the next one goes on, and every line is in the output once."""

import asyncio
import contextlib
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection

from gateway.files.local_storage import LocalStorage
from gateway.files.object_storage import ObjectStorage
from gateway.files.storage import Storage
from gateway.jobs.batches.input.lines import input_name
from gateway.jobs.batches.input.order import ENTRY, order_path
from gateway.jobs.batches.model import Batch, BatchStatus
from gateway.jobs.batches.run import LOST_S
from gateway.jobs.batches.store import BatchStore
from gateway.store_keys import GatewayKeys
from scheduler.store import connection
from tests.gateway.offline import (
    TERMINAL,
    OfflineGateway,
    ScriptedCompletions,
    ShiftedClock,
    jsonl,
    lines,
    running_gateway,
)
from tests.waiting import until


class Crashed(Exception):
    """Raised for every write to the store after a gateway's end."""


class Lifetime:
    """The number of messages that a gateway can still send to the store before it is dead."""

    def __init__(self, messages: int) -> None:
        self.messages = messages
        self.over = asyncio.Event()

    def spend(self) -> None:
        if self.messages == 0:
            self.over.set()
            raise Crashed
        self.messages -= 1


class Mortal(AbstractConnection):
    """A connection that sends nothing once the lifetime is over, as after a SIGKILL: no lock is released."""

    def __init__(self, *, lifetime: Lifetime, **settings: Any) -> None:
        super().__init__(**settings)
        self._lifetime = lifetime

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self._lifetime.spend()
        await super().send_packed_command(command, check_health)


def mortal(client: Redis, lifetime: Lifetime) -> Redis:
    pool = client.connection_pool
    mortal_class = type("MortalConnection", (Mortal, pool.connection_class), {})
    return Redis.from_pool(ConnectionPool(mortal_class, **pool.connection_kwargs, lifetime=lifetime))


async def plant(redis: Redis, data_dir: Path, count: int, *, batch_id: str = "batch_planted", age_s: int = 0) -> str:
    """Create a batch on a gateway that then vanishes. Return its id."""
    now = int(time.time()) - age_s
    copy = data_dir / input_name(batch_id)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(jsonl(lines(count)))
    record = Batch(batch_id, "/v1/chat/completions", "file-1", "24h", BatchStatus.VALIDATING, now, now + 86_400)
    await BatchStore(redis).create(record)
    return batch_id


async def test_a_clock_that_was_set_back_does_not_lock_a_batch_of_a_dead_gateway(
    redis_client: Redis, tmp_path: Path
) -> None:
    batch_id = await plant(redis_client, tmp_path, 3)
    assert await BatchStore(redis_client).owner_lock(batch_id, 7200.0).acquire()
    async with running_gateway(redis_client, tmp_path, lock_ttl_s=0.2) as gateway:
        assert (await gateway.ended(batch_id)).status == "completed"


async def let_locks_lapse(redis: Redis) -> None:
    async for key in redis.scan_iter(GatewayKeys.of(redis).batch_owner("*")):
        await redis.delete(key)


async def assert_every_line_once(gateway: OfflineGateway, batch_id: str, count: int) -> None:
    batch = await gateway.ended(batch_id)
    assert batch.status == "completed" and batch.request_counts is not None
    entries = await gateway.read(batch.output_file_id) + await gateway.read(batch.error_file_id)
    assert sorted(e["custom_id"] for e in entries) == sorted(f"q{n}" for n in range(count))
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (count, count - 1, 1)
    assert batch.usage is not None and batch.usage.total_tokens == 5 * (count - 1)
    for entry in entries:
        if entry["response"]["status_code"] == 200:
            content = entry["response"]["body"]["choices"][0]["message"]["content"]
            assert content == f"Re: {entry['custom_id']}"
    files = [f.filename async for f in gateway.client.files.list(purpose="batch_output")]
    assert sorted(files) == [f"{batch_id}_error.jsonl", f"{batch_id}_output.jsonl"]


def storage_of(shared: str, directory: Path, name: str) -> Storage:
    """Return the storage of the gateway `name`: all share a directory, or a storage elsewhere and no disk."""
    if not shared:
        return LocalStorage(directory)
    storage = ObjectStorage(f"memory://{shared}", directory / name)
    storage.collect_s = 0.02
    return storage


@pytest.mark.parametrize(
    ("is_shared", "order_size"), [(False, None), (False, 0), (False, 100), (False, 10 * ENTRY.size), (True, None)]
)
async def test_a_closed_gateway_releases_its_batches(
    redis_client: Redis, tmp_path: Path, is_shared: bool, order_size: int | None
) -> None:
    """The next one runs what is left, and writes the order of the lines again if it was cut off."""
    shared = secrets.token_hex(4) if is_shared else ""
    first, second = ScriptedCompletions(), ScriptedCompletions()
    first.permits, second.statuses["q19"] = asyncio.Semaphore(4), [400]
    storage = storage_of(shared, tmp_path, "one")
    async with running_gateway(redis_client, storage.directory, completions=first, storage=storage) as gateway:
        created = await gateway.submit(lines(20))
        await gateway.answered(created.id, 4)
        await until(lambda: first.running == 16)
        order = order_path(gateway.files.data_dir / input_name(created.id))
    assert first.running == 0
    if order_size is not None:
        os.truncate(order, order_size)
    storage = storage_of(shared, tmp_path, "two")
    async with running_gateway(redis_client, storage.directory, completions=second, storage=storage) as gateway:
        await assert_every_line_once(gateway, created.id, 20)
        assert await storage.entries("batches") == [] and len(await storage.entries("files")) == 3
    assert not first.answered.keys() & second.answered.keys(), "recorded lines are not run again"


async def live(redis: Redis, directory: Path, messages: int, batch_id: str, **options: Any) -> None:
    """Run a gateway until the batch is over, or until it has sent so many messages to the store."""
    lifetime, completions = Lifetime(messages), _refusing_one()
    client = mortal(redis, lifetime)
    async with running_gateway(client, directory, completions=completions, max_lines_in_flight=3, **options):
        async with asyncio.timeout(30):
            over, key = [status.encode() for status in TERMINAL], GatewayKeys.of(redis).batch(batch_id)
            while not lifetime.over.is_set() and await redis.hget(key, "status") not in over:
                await asyncio.sleep(0.002)
        lifetime.messages = 0
    with contextlib.suppress(Crashed):
        await client.aclose()


def _refusing_one() -> ScriptedCompletions:
    completions = ScriptedCompletions()
    completions.statuses["q3"] = [400]
    return completions


async def test_two_gateways_share_a_batch_without_running_a_line_twice(
    redis_client: Redis, valkey_url: str, tmp_path: Path
) -> None:
    other = connection.connect(valkey_url)
    completions = _refusing_one()
    async with (
        running_gateway(redis_client, tmp_path, completions=completions) as one,
        running_gateway(other, tmp_path, completions=completions) as two,
    ):
        created = [await (one, two)[n % 2].submit(lines(12)) for n in range(2)]
        completions.statuses["q3"] = [400] * 2
        for batch in created:
            ended = await two.ended(batch.id)
            assert ended.status == "completed"
        assert set(completions.calls.values()) == {2}
    await other.aclose()


async def test_a_gateway_that_lost_its_lock_stops(redis_client: Redis, tmp_path: Path) -> None:
    completions = ScriptedCompletions()
    completions.permits = asyncio.Semaphore(0)
    async with running_gateway(redis_client, tmp_path, completions=completions, lock_ttl_s=0.3) as gateway:
        created = await gateway.submit(lines(3))
        await until(lambda: completions.running == 3)
        await redis_client.set(GatewayKeys.of(redis_client).batch_owner(created.id), "another gateway")
        await until(lambda: completions.running == 0)
        for _ in range(3):
            completions.permits.release()
        assert (await gateway.client.batches.retrieve(created.id)).status == "in_progress"
        await redis_client.delete(GatewayKeys.of(redis_client).batch_owner(created.id))
        assert (await gateway.ended(created.id)).status == "completed"


async def test_cancel_reaches_a_batch_of_another_gateway(redis_client: Redis, valkey_url: str, tmp_path: Path) -> None:
    other = connection.connect(valkey_url)
    completions = ScriptedCompletions()
    completions.permits = asyncio.Semaphore(0)
    async with (
        running_gateway(redis_client, tmp_path, completions=completions) as one,
        running_gateway(other, tmp_path) as two,
    ):
        created = await one.submit(lines(5))
        await until(lambda: completions.running == 5)
        assert (await two.client.batches.cancel(created.id)).status == "cancelling"
        assert (await two.ended(created.id)).status == "cancelled"
        assert completions.running == 0
    await other.aclose()


async def test_lines_of_a_batch_that_is_cancelled_before_it_begins_are_named(
    redis_client: Redis, tmp_path: Path
) -> None:
    batch_id = await plant(redis_client, tmp_path, 3)
    await BatchStore(redis_client).move(batch_id, BatchStatus.CANCELLING, int(time.time()))
    async with running_gateway(redis_client, tmp_path) as gateway:
        batch = await gateway.ended(batch_id)
        unfinished = await gateway.read(batch.error_file_id)
    assert (batch.status, batch.in_progress_at, batch.output_file_id) == ("cancelled", None, None)
    assert batch.request_counts is not None and batch.request_counts.total == 3
    assert [entry["error"]["code"] for entry in unfinished] == ["batch_cancelled"] * 3


LOST_STATES = [
    ([], "expired"),
    ([BatchStatus.IN_PROGRESS], "expired"),
    ([BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING], "expired"),
    ([BatchStatus.CANCELLING], "cancelled"),
]


@pytest.mark.parametrize(("states", "end"), LOST_STATES)
async def test_a_batch_whose_input_is_lost_ends_after_its_window(
    redis_client: Redis, tmp_path: Path, states: list[BatchStatus], end: str
) -> None:
    batch_id = await plant(redis_client, tmp_path / "gone", 3)
    for state in states:
        await BatchStore(redis_client).move(batch_id, state, 1)
    clock = ShiftedClock()
    clock.shift_s = 86_400 + LOST_S + 10
    async with running_gateway(redis_client, tmp_path / "here", clock=clock) as gateway:
        batch = await gateway.ended(batch_id)
        assert batch.status == end and batch.errors is not None and batch.errors.data is not None
        assert [e.code for e in batch.errors.data] == ["input_lost"]
        await until(lambda: _is_over(redis_client))


async def test_the_gateway_with_the_input_gets_time_to_come_back(redis_client: Redis, tmp_path: Path) -> None:
    batch_id = await plant(redis_client, tmp_path / "away", 3)
    lost_id = await plant(redis_client, tmp_path / "gone", 3, batch_id="batch_lost", age_s=120)
    clock = ShiftedClock()
    clock.shift_s = 86_400 + LOST_S - 60
    async with running_gateway(redis_client, tmp_path / "here", clock=clock) as gateway:
        assert (await gateway.ended(lost_id)).status == "expired"
        assert (await gateway.client.batches.retrieve(batch_id)).status == "validating"
    async with running_gateway(redis_client, tmp_path / "away", clock=clock) as gateway:
        batch = await gateway.ended(batch_id)
        assert batch.status == "expired" and len(await gateway.read(batch.error_file_id)) == 3


@pytest.mark.parametrize("is_shared", [False, True], ids=["directory", "elsewhere"])
@settings(max_examples=settings().max_examples // 10)
@given(lives=st.lists(st.integers(0, 45), min_size=1, max_size=3))
async def test_a_gateway_may_die_at_any_message_to_the_store(
    redis_client: Redis, is_shared: bool, lives: list[int]
) -> None:
    """Each gateway dies at a drawn message, and takes along what it has on its disk; the last one lives on."""
    await redis_client.flushdb()
    shared = secrets.token_hex(4) if is_shared else ""
    with tempfile.TemporaryDirectory() as folder:
        idle = ScriptedCompletions()
        idle.permits = asyncio.Semaphore(0)
        storage = storage_of(shared, Path(folder), "creator")
        async with running_gateway(redis_client, storage.directory, completions=idle, storage=storage) as gateway:
            batch_id = (await gateway.submit(lines(12))).id
            await until(lambda: idle.running > 0)
        for number, messages in enumerate(lives):
            storage = storage_of(shared, Path(folder), str(number))
            await live(redis_client, storage.directory, messages, batch_id, storage=storage)
            await let_locks_lapse(redis_client)
        storage, completions = storage_of(shared, Path(folder), "last"), _refusing_one()
        async with running_gateway(redis_client, storage.directory, completions=completions, storage=storage) as last:
            await assert_every_line_once(last, batch_id, 12)
        for kind in ("results", "done"):
            assert await redis_client.keys(f"{GatewayKeys.of(redis_client).prefix}batches:{kind}:*") == []


async def _is_over(redis: Redis) -> bool:
    return not await redis.exists(GatewayKeys.of(redis).batches_unfinished)
