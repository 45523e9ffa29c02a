"""Failovers between two real servers: the connections of a client follow the primary."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreUnreachable

from scheduler.store import connection, durability
from scheduler.store.durability import durable
from scheduler.store.errors import CAUSES, STORE_AWAY, NotDurable, StoreRefused
from scheduler.store.state import read_state
from tests.scheduler.store.nodes import Pair, Sentinel, running_sentinel
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)
MAX_AWAY_S = 20.0  # a second or two is usual; without a retry at the right node, it is for ever, or 30 s


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[Redis]:
    client = connection.connect(pair.url)
    yield client
    await client.aclose()


async def by_command(client: Redis) -> None:
    await client.set("key", "by command")


async def by_pipeline(client: Redis) -> None:
    await client.pipeline(transaction=False).get("key").set("key", "by pipeline").execute()


async def by_transaction(client: Redis) -> None:
    await client.pipeline(transaction=True).set("key", "by transaction").get("key").execute()


async def by_script(client: Redis) -> None:
    await client.register_script("return redis.call('SET', KEYS[1], ARGV[1])")(keys=["key"], args=["by script"])


async def by_confirmation(client: Redis) -> None:
    await durable(client)


WRITES: tuple[Callable[[Redis], Awaitable[None]], ...] = (
    by_command,
    by_pipeline,
    by_transaction,
    by_script,
    by_confirmation,
)


async def test_every_kind_of_write_follows_the_primary(pair: Pair, client: Redis) -> None:
    """Each kind meets the demoted node first, on a connection of its own."""
    for write in WRITES:
        await write(client)
        await pair.promote()
        pair.rename()
        async with asyncio.timeout(MAX_AWAY_S):
            await write(client)


async def test_idle_connections_read_from_the_new_primary_once_one_has_met_the_old_one(
    pair: Pair, client: Redis
) -> None:
    await asyncio.gather(*(client.get("key") for _ in range(8)))
    await pair.promote()
    pair.replica.ask("REPLICAOF", "127.0.0.1", "1")  # cut off from the primary, so that its data grow old
    pair.rename()
    await client.set("key", "new")
    assert set(await asyncio.gather(*(client.get("key") for _ in range(8)))) == {b"new"}


async def test_a_reader_that_waits_is_sent_to_the_new_primary(pair: Pair, client: Redis) -> None:
    reader = connection.blocking(client, 30.0)
    first = await client.xadd("stream", {"n": 1})
    reading = asyncio.create_task(reader.xread({"stream": first}, block=30_000))
    while not (await client.info("clients"))["blocked_clients"]:
        await asyncio.sleep(0.005)
    pair.replica.ask("REPLICAOF", "NO", "ONE")
    pair.primary, pair.replica = pair.replica, pair.primary
    pair.rename()
    pair.replica.ask("REPLICAOF", "127.0.0.1", str(pair.primary.port))  # answers UNBLOCKED
    await client.xadd("stream", {"n": 2})
    async with asyncio.timeout(MAX_AWAY_S):
        [(_, entries)] = await reading
    assert [fields for _, fields in entries] == [{b"n": b"2"}]
    await reader.aclose()


@pytest.fixture
async def impatient(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Redis]:
    monkeypatch.setattr(connection, "RETRIES", 2)
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.3)
    client = connection.connect(pair.url)
    yield client
    await client.aclose()


async def test_a_name_that_leads_to_a_replica_is_refused_after_the_last_retry(pair: Pair, impatient: Redis) -> None:
    await impatient.set("key", "value")
    await pair.promote()
    with pytest.raises(StoreRefused, match=CAUSES["READONLY"]):
        await impatient.set("key", "other")
    assert await impatient.get("key") == b"value"


async def test_a_write_whose_reply_was_lost_is_not_called_refused(pair: Pair, impatient: Redis) -> None:
    """The first attempt may have been executed; only the later ones were refused."""
    await impatient.set("key", "value")
    stopped = pair.primary
    stopped.send(signal.SIGSTOP)
    writing = asyncio.create_task(impatient.set("key", "other"))
    pair.primary, pair.replica = pair.replica, pair.primary
    pair.rename()  # to a node that is still a replica
    with pytest.raises(StoreUnreachable) as lost:
        await writing
    assert not isinstance(lost.value, StoreRefused)
    stopped.send(signal.SIGCONT)


async def test_writes_are_durable_once_enough_replicas_have_them(
    pair: Pair, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "REPLICAS_S", 0.1)
    durability.wait_for_replicas(client, 1)
    for on_disk in (True, False):
        await client.set("key", "value")
        assert await durable(client, "key", on_disk=on_disk) is True
        assert pair.replica.ask("GET", "key") == b"value"
        pair.replica.send(signal.SIGSTOP)
        await client.set("other", "value")
        with pytest.raises(NotDurable, match=durability.TOO_FEW_REPLICAS):
            await durable(client, "other", on_disk=on_disk)
        pair.replica.send(signal.SIGCONT)
        await until(lambda: is_durable(client, on_disk))  # noqa: B023
    durability.wait_for_replicas(client, 2)
    with pytest.raises(NotDurable, match=durability.TOO_FEW_REPLICAS):
        await durable(client)


async def test_the_server_says_which_replicas_follow_and_how_far_behind_they_are(pair: Pair, client: Redis) -> None:
    await until(lambda: following(client, 1))
    state = await read_state(client)
    assert 0 < state.memory_bytes < state.memory_limit_bytes
    assert state.replica_lag_bytes is not None
    pair.replica.send(signal.SIGSTOP)
    await client.set("large", b"x" * 2**20)
    assert ((await read_state(client)).replica_lag_bytes or 0) >= 2**20
    pair.replica.end(signal.SIGKILL)
    await until(lambda: following(client, 0))
    assert (await read_state(client)).replica_lag_bytes is None


async def following(client: Redis, count: int) -> bool:
    return (await read_state(client)).replicas == count


async def is_durable(client: Redis, on_disk: bool) -> bool:
    with contextlib.suppress(NotDurable):
        return await durable(client, on_disk=on_disk)
    return False


async def test_a_write_that_a_failover_has_lost_is_not_durable(pair: Pair, client: Redis) -> None:
    await pair.replica.has_all_of(pair.primary)
    pair.part()
    await client.set("lost", "value")
    await pair.demote()
    await pair.replica.has_all_of(pair.primary)
    durability.wait_for_replicas(client, 1)
    with pytest.raises(NotDurable, match=durability.LOST):
        await durable(client, "lost")


@pytest.fixture
async def sentinel(pair: Pair, tmp_path: Path) -> AsyncIterator[Sentinel]:
    async with running_sentinel(tmp_path, pair) as sentinel:
        yield sentinel


async def test_a_client_asks_the_sentinels_for_the_primary_and_follows_a_planned_failover(
    pair: Pair, sentinel: Sentinel
) -> None:
    client = connection.connect(sentinel.url)
    reader = connection.blocking(client, 60.0)
    await client.set("key", "before")
    assert await reader.get("key") == b"before"
    waiting = asyncio.create_task(reader.blpop(["list"], 60))
    sentinel.fail_over()
    await until(lambda: sentinel.port_of_primary == pair.replica.port)
    pair.replica.ask("RPUSH", "list", "item")

    async def is_written_to_the_new_one() -> bool:
        await client.set("key", "after")
        return bool(pair.replica.ask("GET", "key") == b"after")

    assert pair.primary.ask("ROLE")[0] == b"master", "it takes writes that will be lost"
    await until(is_written_to_the_new_one, MAX_AWAY_S)
    assert await reader.get("key") == b"after"
    async with asyncio.timeout(MAX_AWAY_S):  # a read that waits at the old primary is cut off, and tried again
        assert await waiting == (b"list", b"item")
    await reader.aclose()
    await client.aclose()


async def test_a_listener_that_asks_the_sentinels_can_be_cancelled_at_any_moment(sentinel: Sentinel) -> None:
    async def listen(client: Redis) -> None:
        async for _ in connection.messages(client, "channel"):
            pass

    for moment in range(40):
        client = connection.connect(sentinel.url)
        task = asyncio.create_task(listen(client))
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=30)
        task.cancel()
        assert done, "a cancellation was swallowed"
        await client.aclose()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_client_writes_again_after_the_death_of_the_primary(
    pair: Pair, sentinel: Sentinel, number: int
) -> None:
    """A primary that is stopped keeps its connections open, and answers nothing."""
    client = connection.connect(sentinel.url)
    await asyncio.gather(*(client.set("key", "before") for _ in range(8)))
    pair.primary.send(number)
    writing = asyncio.create_task(write_until_it_works(client))
    await until(lambda: pair.replica.ask("ROLE")[0] == b"master")
    async with asyncio.timeout(2 * MAX_AWAY_S):
        await writing
        await asyncio.gather(*(client.set("key", "after") for _ in range(8)))
    await client.aclose()


async def write_until_it_works(client: Redis) -> None:
    while True:
        with contextlib.suppress(*STORE_AWAY):
            return await by_command(client)
