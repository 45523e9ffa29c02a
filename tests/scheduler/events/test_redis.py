"""The event channel in Redis: the lifetime of streams, and dropped connections."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from scheduler.events.redis import RedisEventChannel
from scheduler.request import EventKind, TokenEvent
from scheduler.store import connection, keys
from scheduler.store.keys import Keys
from tests.scheduler.stalling_proxy import StallingProxy
from tests.waiting import until


def stream_of(client: Redis) -> str:
    return Keys.of(client).events + "g"


@pytest.fixture
async def channel(no_leaked_keys: None, redis_client: Redis) -> AsyncIterator[RedisEventChannel]:
    channel = RedisEventChannel(redis_client, ttl_s=5.0, heartbeat_s=0.02)
    await channel.open("g")
    yield channel
    await channel.close()


@pytest.fixture
async def received(channel: RedisEventChannel) -> AsyncIterator[list[int]]:
    """The token ids that a listener has received so far."""
    received: list[int] = []

    async def listen() -> None:
        async for message in channel.listen("g"):
            received.extend(token_id for event in message for token_id in event.token_ids)

    listening = asyncio.create_task(listen())
    yield received
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


def message(token_id: int) -> list[TokenEvent]:
    return [TokenEvent("r", EventKind.TOKENS, index=token_id, token_ids=(token_id,))]


async def test_dropped_connections_neither_lose_nor_repeat(
    channel: RedisEventChannel, received: list[int], redis_client: Redis
) -> None:
    for n in range(200):
        await channel.publish({"g": message(n)})
        if n % 20 == 0:
            await redis_client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await until(lambda: len(received) >= 200)
    assert received == list(range(200))


async def test_a_listener_notices_a_connection_that_broke_without_being_closed(
    valkey_url: str, redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.1)
    received: list[int] = []
    async with StallingProxy(valkey_url, tmp_path / "proxy.sock").serving() as proxy:
        client = connection.connect(proxy.url)
        channel, publisher = RedisEventChannel(client, heartbeat_s=0.05), RedisEventChannel(redis_client)
        await channel.open("g")

        async def listen() -> None:
            async for events in channel.listen("g"):
                received.extend(event.index for event in events)

        listening = asyncio.create_task(listen())
        for n in range(3):
            await publisher.publish({"g": message(n)})
            await until(lambda count=n + 1: len(received) == count)
            proxy.stall()
        await channel.close()
        await listening
        await client.aclose()
    assert received == [0, 1, 2]


async def test_listening_keeps_the_stream_alive_and_short(
    channel: RedisEventChannel, received: list[int], redis_client: Redis
) -> None:
    for n in range(50):
        await channel.publish({"g": message(n)})

    async def trimmed() -> bool:
        return await redis_client.xlen(stream_of(redis_client)) <= 1

    await until(trimmed)
    assert received == list(range(50))
    await redis_client.pexpire(stream_of(redis_client), 1000)

    async def refreshed() -> bool:
        return await redis_client.pttl(stream_of(redis_client)) > 1000

    await until(refreshed)


async def test_a_gateway_that_stops_listening_is_gone_after_the_ttl(redis_client: Redis) -> None:
    channel = RedisEventChannel(redis_client, ttl_s=0.02)
    await channel.open("g")

    async def refused() -> bool:
        return await channel.publish({"g": message(1)}) == ["g"]

    await until(refused)
    await channel.close()


async def test_a_lost_stream_is_opened_again(
    channel: RedisEventChannel, received: list[int], redis_client: Redis
) -> None:
    await channel.publish({"g": message(1)})
    await until(lambda: received == [1])
    await redis_client.delete(stream_of(redis_client))

    async def accepted() -> bool:
        return await channel.publish({"g": message(2)}) == []

    await until(accepted)
    await until(lambda: received == [1, 2])


async def test_a_stream_without_a_reader_is_bounded(
    channel: RedisEventChannel, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "EVENTS_MAXLEN", 1000)
    entry = {b"m": b""}
    pipeline = redis_client.pipeline(transaction=False)
    for _ in range(keys.EVENTS_MAXLEN + 500):
        pipeline.xadd(stream_of(redis_client), entry)  # type: ignore[arg-type]
    await pipeline.execute()
    await channel.publish({"g": message(1)})
    assert await redis_client.xlen(stream_of(redis_client)) < keys.EVENTS_MAXLEN + 200


async def test_a_message_that_cannot_be_read_is_skipped(
    channel: RedisEventChannel, received: list[int], redis_client: Redis
) -> None:
    await redis_client.xadd(stream_of(redis_client), {"m": b"\xc1"})
    await channel.publish({"g": message(7)})
    await until(lambda: received == [7])
