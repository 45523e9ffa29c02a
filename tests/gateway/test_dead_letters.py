"""The list of dead letters is bounded in number and age, and a store that takes no writes does not break an answer."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from gateway import dead_letters
from gateway.dead_letters import DeadLetter, DeadLetters
from gateway.store_keys import DEAD_LETTER_S, GatewayKeys

NOW_MS = 1_700_000_000_000


def letter(name: str, at_ms: int = NOW_MS) -> DeadLetter:
    return DeadLetter(name, "batch", 4, "Its worker died.", at_ms, owner="team")


@pytest.fixture
async def letters(redis_client: Redis) -> AsyncIterator[DeadLetters]:
    yield DeadLetters(redis_client)


async def ids(letters: DeadLetters, limit: int = 99, after: str | None = None) -> list[str] | None:
    page = await letters.page(limit, after)
    return None if page is None else [found.id for found in page]


async def test_a_letter_learns_its_batch(letters: DeadLetters) -> None:
    await letters.add(letter("req_1"))
    await letters.assign("req_1", "batch_1", "line-7", 7)
    await letters.assign("unknown", "batch_1", "line-8", 8)
    expected = replace(letter("req_1"), batch_id="batch_1", custom_id="line-7", line=7)
    assert await letters.page(9) == [expected]


async def test_too_many_letters_and_old_ones_are_removed(
    letters: DeadLetters, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_DEAD_LETTERS", 3)
    await letters.add(letter("old", NOW_MS - 1000 * DEAD_LETTER_S))
    assert await letters.count(NOW_MS + 1) == 0
    for i in range(5):
        await letters.add(letter(f"req_{i}", NOW_MS + i))
    assert await ids(letters) == ["req_4", "req_3", "req_2"]
    assert await letters.count(NOW_MS) == 3
    key = GatewayKeys.of(redis_client).dead_letter
    assert sorted(await redis_client.keys(key + "*")) == [f"{key}req_{i}".encode() for i in (2, 3, 4)]
    assert 0 < await redis_client.ttl(GatewayKeys.of(redis_client).dead_letters) <= DEAD_LETTER_S


async def test_a_store_that_takes_no_writes_is_no_error(letters: DeadLetters, redis_client: Redis) -> None:
    await redis_client.config_set("maxmemory", 1)
    try:
        await letters.add(letter("req_1"))
    finally:
        await redis_client.config_set("maxmemory", 0)
    assert await ids(letters) == []
