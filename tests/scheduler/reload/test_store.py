"""The shared tiers in a real store: one proposal at a time, and the list of followers."""

import asyncio

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from scheduler.reload.store import UNKNOWN, Follower, Reading, TierStore
from scheduler.store import keys
from scheduler.store.keys import Keys
from tests.waiting import until

CONTENT = {"default_tier": "a", "tiers": {"a": {"priority": 1, "max_wait_ms": {"min": 0.0}, "service_tiers": ["x"]}}}


@pytest.fixture
def store(redis_client: Redis) -> TierStore:
    return TierStore(redis_client)


async def test_a_proposal_is_put_in_force(store: TierStore, redis_client: Redis) -> None:
    assert await store.read() == Reading(None, None)
    document = await store.propose(CONTENT, "ünit test", 1_700_000_000_000)
    assert document is not None
    assert document.content == CONTENT
    assert await store.read() == Reading(None, document)
    assert await store.commit(document)
    assert await store.read() == Reading(document, None)
    assert await store.commit(document), "told again, after a lost answer"
    assert await redis_client.keys("*") == [Keys.of(redis_client).tiers.encode()]


async def test_one_proposal_at_a_time(store: TierStore) -> None:
    first = await store.propose(CONTENT, "first", 0)
    assert first is not None
    assert await store.propose(CONTENT, "second", 0) is None
    await store.withdraw(first)
    second = await store.propose(CONTENT, "second", 0)
    assert second is not None
    assert second.generation > first.generation
    assert not await store.commit(first), "withdrawn"
    await store.withdraw(first)
    assert await store.read() == Reading(None, second)


async def test_followers_are_listed_until_they_leave_or_fall_silent(
    store: TierStore, redis_client: Redis, no_leaked_keys: None
) -> None:
    assert await store.followers() == []
    ada, bob = Follower("ada", 3, 4, "no"), Follower("bob")
    await store.report(bob)
    await store.report(ada)
    assert await store.followers() == [ada, bob]
    assert 0 < await redis_client.pttl(Keys.of(redis_client).follower + "ada") <= keys.FOLLOWER_TTL_S * 1000
    await redis_client.delete(Keys.of(redis_client).follower + "ada")
    assert await store.followers() == [bob]
    assert await redis_client.smembers(Keys.of(redis_client).followers) == {b"bob"}
    await store.leave("bob")
    await store.leave("nobody")
    assert await store.followers() == []


async def test_listeners_are_told_of_changes(store: TierStore) -> None:
    heard: list[int] = []
    listening = asyncio.create_task(store.listen(lambda: heard.append(1)))
    await until(lambda: len(heard) == 1)  # the subscription itself, because something may have been missed before
    document = await store.propose(CONTENT, "x", 0)
    await until(lambda: len(heard) == 2)
    assert document is not None
    await store.commit(document)
    await until(lambda: len(heard) == 3)
    listening.cancel()
    await asyncio.wait([listening])


async def test_a_report_that_cannot_be_read_counts_as_one_without_a_vote(store: TierStore, redis_client: Redis) -> None:
    for part in ("ada", "bob"):
        await store.report(Follower(part, 3))
    await redis_client.set(Keys.of(redis_client).follower + "ada", b"\x81\xa4part\x01")
    with capture_logs() as logs:
        for _ in range(2):
            assert await store.followers() == [Follower("ada", UNKNOWN), Follower("bob", 3)]
    assert [line["record"] for line in logs] == ["the report of ada"]
