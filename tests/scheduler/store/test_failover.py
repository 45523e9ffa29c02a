"""Failovers between two real servers: the connections of a client follow the primary."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreUnreachable

from scheduler.store import connection
from scheduler.store.durability import durable
from scheduler.store.errors import CAUSES, StoreRefused
from tests.scheduler.store.nodes import Pair, server_pair

pytestmark = pytest.mark.timeout(60)
MAX_AWAY_S = 5.0  # the longest time from a promotion to the next write


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    with server_pair(tmp_path) as pair:
        await pair.start()
        yield pair


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
