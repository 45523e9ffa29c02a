"""Connections: outages that they survive, time limits, and `durable`."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreUnreachable
from redis.exceptions import TimeoutError as StoreSilent

from scheduler.store import connection
from scheduler.store.durability import ROUNDS, durable
from scheduler.store.errors import NotDurable
from scheduler.store.keys import Keys
from tests.scheduler.store.nodes import Server, embedded_server
from tests.waiting import until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with embedded_server(tmp_path) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Redis]:
    client = connection.connect(server.valkey.url)
    yield client
    await client.aclose()


async def test_commands_survive_a_restart_of_the_server(server: Server, client: Redis) -> None:
    await server.start()
    await client.set("key", "value")
    server.end(signal.SIGKILL)
    await server.start()
    assert await client.get("key") == b"value"


async def test_commands_fail_in_bounded_time_without_a_server(client: Redis) -> None:
    with pytest.raises(StoreUnreachable):
        await client.get("key")


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_S", 0.75)


async def test_commands_fail_in_bounded_time_when_the_server_hangs(short_timeouts: None, server: Server) -> None:
    """The server still accepts connections, and every attempt takes the whole reply timeout."""
    await server.start()
    client = connection.connect(server.valkey.url)
    await client.set("key", "value")
    server.send(signal.SIGSTOP)
    async with asyncio.timeout(30):
        with pytest.raises(StoreSilent):
            await client.get("key")
        with pytest.raises(StoreSilent):
            await client.pipeline(transaction=False).get("key").execute()
    server.send(signal.SIGCONT)
    assert await client.get("key") == b"value"
    await client.aclose()


async def test_a_blocking_client_waits_longer_than_any_reply_may_take(redis_client: Redis) -> None:
    reader = connection.blocking(redis_client, 2.0)
    settings = reader.connection_pool.connection_kwargs
    assert settings["socket_timeout"] == 2.0 + connection.REPLY_TIMEOUT_S
    assert settings["route"] is redis_client.connection_pool.connection_kwargs["route"], "it leads to the same server"
    assert redis_client.connection_pool.connection_kwargs["socket_timeout"] == connection.REPLY_TIMEOUT_S
    assert await reader.ping()
    await reader.aclose()


def test_the_backoff_stays_within_its_bound_after_any_number_of_failures() -> None:
    backoff = connection._backoff()
    assert all(0 <= backoff.compute(failures) <= connection.MAX_BACKOFF_S for failures in (1, 10, 1023, 1024, 10**6))


async def test_durable_covers_the_writes_of_other_connections(server: Server, client: Redis) -> None:
    """WAITAOF alone returns at once on a connection that has written nothing."""
    await server.start("--appendfsync", "no")
    other = connection.connect(server.valkey.url)
    await other.set("key", "value")
    assert (await client.execute_command("WAITAOF", 1, 0, 50))[0] == 1
    with pytest.raises(NotDurable):
        await durable(client, timeout_s=0.05)
    await other.aclose()


async def test_a_write_that_the_server_has_lost_is_not_durable(client: Redis, server: Server) -> None:
    """The server crashes after it has answered, and confirms what it has left. Without its log, that is nothing."""
    await server.start()
    await client.set("lost", "1")
    assert await durable(client, "lost") is True
    server.end(signal.SIGKILL)
    shutil.rmtree(server.valkey.data_dir / "appendonlydir")
    await server.start()
    assert await durable(client) is True
    with pytest.raises(NotDurable, match="has lost what it had taken last"):
        await durable(client, "lost")


async def test_a_server_without_an_aof_is_not_durable(server: Server, client: Redis) -> None:
    await server.start("--appendonly", "no")
    assert await durable(client) is False


async def test_many_waits_for_the_disk_leave_connections_to_others(server: Server, client: Redis) -> None:
    await server.start("--appendfsync", "no")
    await client.set("key", "value")
    await client.config_resetstat()
    waits = []
    for n in range(2 * ROUNDS):
        waits += [asyncio.create_task(durable(client, "key", timeout_s=4.5)) for _ in range(20)]
        await until(lambda n=n: _num_blocked(client, min(n + 1, ROUNDS)))  # type: ignore[misc]
    assert await client.get("key") == b"value"  # as many waits as connections would leave none
    assert not any(wait.done() for wait in waits)
    await client.config_set("appendfsync", "always")
    await client.set("key", "other")
    assert await asyncio.gather(*waits) == [True] * len(waits)
    assert (await client.info("commandstats"))["cmdstat_waitaof"]["calls"] == ROUNDS + 1


async def _num_blocked(client: Redis, count: int) -> bool:
    return bool((await client.info("clients"))["blocked_clients"] == count)


async def test_a_task_that_sends_commands_can_be_cancelled_at_any_moment(redis_client: Redis) -> None:
    async def send_commands() -> None:
        while True:
            await redis_client.get(Keys.of(redis_client).probe)

    await redis_client.ping()
    for moment in range(300):
        task = asyncio.create_task(send_commands())
        for _ in range(moment % 13):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=30)
        if not done:
            task.cancel()
        assert done, "a cancellation was swallowed"


async def test_a_burst_of_commands_waits_for_a_connection(redis_client: Redis) -> None:
    counts = await asyncio.gather(*(redis_client.incr(Keys.of(redis_client).sequence) for _ in range(1000)))
    assert sorted(counts) == list(range(1, 1001))
