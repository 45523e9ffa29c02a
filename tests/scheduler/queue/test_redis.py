"""The queue in Redis: its keys, scripts and connections."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from scheduler.queue.base import Backlog, TooFarBehind
from scheduler.queue.redis import RedisQueue
from scheduler.store import connection
from scheduler.store.keys import Keys
from tests.scheduler.queue.harness import START_MS, ManualClock, ids, lease_of, make_request, may_wait
from tests.scheduler.stalling_proxy import StallingProxy
from tests.waiting import until


@pytest.fixture
async def queue(no_leaked_keys: None, redis_client: Redis, clock: ManualClock) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue(redis_client, clock, worker_id="w1")
    yield queue
    await queue.close()


async def subscribers(client: Redis) -> int:
    [(_, count)] = await client.pubsub_numsub(Keys.of(client).wake + "w1")
    return int(count)


async def test_a_request_is_stored_under_the_documented_keys(queue: RedisQueue, redis_client: Redis) -> None:
    await queue.put([make_request("a", "bulk", START_MS + 5)])
    prefix = Keys.of(redis_client).prefix
    [(member, score)] = await redis_client.zrange(f"{prefix}queue:bulk", 0, -1, withscores=True)
    assert (member[-2:], score) == (b":a", START_MS + 5)
    [claimed] = await queue.claim({"bulk": 1}, 2.5)
    assert await redis_client.zrange(f"{prefix}leases", 0, -1, withscores=True) == [(b"a", START_MS + 2500)]
    assert await redis_client.smembers(f"{prefix}held:w1") == {b"a"}
    record = await redis_client.hgetall(f"{prefix}request:a")
    assert record[b"worker"] == b"w1"
    assert record[b"fence"] == str(claimed.fence).encode()
    assert record[b"attempt"] == b"1"
    assert await queue.ack([lease_of(claimed)]) == [True]
    left = {key.decode().removeprefix(prefix) for key in await redis_client.keys("*")}
    assert left - {"claim:w1"} == {"sequence", "epoch"}


async def test_deployments_on_one_store_do_not_see_each_other(
    valkey_url: str, queue: RedisQueue, clock: ManualClock
) -> None:
    async with connection.connect(f"{valkey_url}?deployment=blue") as client:
        blue = RedisQueue(client, clock, worker_id="w1")
        await blue.put([make_request("a")])
        assert await queue.claim({"realtime": 1}, 5) == []
        [claimed] = await blue.claim({"realtime": 1}, 5)
        assert await queue.ack([lease_of(claimed)]) == [False]
        assert await blue.ack([lease_of(claimed)]) == [True]
        await blue.close()
        await client.delete(*await client.keys("*blue*"))  # the numbers, which stay


async def test_no_key_is_left_however_a_request_ends(queue: RedisQueue, clock: ManualClock) -> None:
    await queue.put([make_request(name) for name in "abcd"])
    a, b, c = await queue.claim({"realtime": 3}, 5)
    await queue.ack([lease_of(a)])
    await queue.release([lease_of(b)])
    clock.advance(6)
    assert await queue.requeue_expired(await queue.expired_leases(5)) == ["c"]
    assert await queue.cancel(["b", "c", "d"]) == [True, True, True]


async def test_the_leases_of_others_cost_a_requeue_nothing(queue: RedisQueue, redis_client: Redis) -> None:
    await queue.put([make_request(f"r{n:03}") for n in range(200)])
    other = RedisQueue(redis_client, queue._clock, "w2#1")
    try:
        await queue.claim({"realtime": 199}, 5)
        await other.claim({"realtime": 1}, 5)
        await redis_client.config_resetstat()
        assert await queue.requeue_worker("w2") == ["r199"]
        assert await queue.requeue_worker("w2") == [], "a second peer finds nothing"
        stats = await redis_client.info("commandstats")
        assert sum(found["calls"] for found in stats.values()) < 50
    finally:
        await other.close()
        await queue.cancel([f"r{n:03}" for n in range(200)])


async def test_what_a_worker_of_the_release_before_holds_comes_back_when_its_leases_end(
    queue: RedisQueue, redis_client: Redis, clock: ManualClock
) -> None:
    """It has no set of what it holds. And it knows none, so what this release holds may end without its set."""
    await queue.put([make_request(name) for name in "ab"])
    await queue.claim({"realtime": 1}, 5)
    await redis_client.delete(Keys.of(redis_client).held + "w1")
    assert await queue.requeue_worker("w1") == []
    clock.advance(6)
    assert await queue.requeue_expired(await queue.expired_leases(5)) == ["a"]
    await queue.claim({"realtime": 1}, 5)
    await redis_client.zrem(Keys.of(redis_client).leases, "a")
    await redis_client.delete(Keys.of(redis_client).request + "a")
    assert await queue.requeue_worker("w1") == []
    await queue.cancel(["b"])


async def test_scripts_are_sent_again_to_a_server_that_does_not_know_them(
    queue: RedisQueue, redis_client: Redis
) -> None:
    await queue.put([make_request("a")])
    await redis_client.script_flush()
    [a] = await queue.claim({"realtime": 1}, 5)
    assert await queue.ack([lease_of(a)]) == [True]


async def test_fences_still_grow_after_the_store_has_lost_everything(
    queue: RedisQueue, redis_client: Redis, clock: ManualClock
) -> None:
    await queue.put([make_request("a")])
    [before] = await queue.claim({"realtime": 1}, 5)
    await redis_client.flushall()
    clock.advance(0.01)
    await queue.put([make_request("a")])
    [after] = await queue.claim({"realtime": 1}, 5)
    assert after.fence > before.fence
    assert await queue.ack([lease_of(before), lease_of(after)]) == [False, True]


async def test_a_removed_payload_does_not_block_the_queue(queue: RedisQueue, redis_client: Redis) -> None:
    await queue.put([make_request(name) for name in "abc"])
    await queue.claim({"realtime": 1}, 0)
    await redis_client.delete(Keys.of(redis_client).request + "a", Keys.of(redis_client).request + "b")
    assert await queue.requeue_expired(await queue.expired_leases(5)) == []
    [c] = await queue.claim({"realtime": 5}, 5)
    assert await queue.ack([lease_of(c)]) == [True]
    assert await queue.requeue_worker("w1") == []


@pytest.mark.parametrize("move", ["put", "claim", "cancel", "refused"])
async def test_lost_sums_are_computed_anew(queue: RedisQueue, redis_client: Redis, move: str) -> None:
    await queue.put([make_request(name, tokens=10, output=2) for name in "abc"])
    await redis_client.delete(Keys.of(redis_client).waiting + "realtime")
    match move:
        case "put":
            await queue.put([make_request("d", tokens=10, output=2)])
        case "claim":
            await queue.claim({"realtime": 1}, 5)
        case "cancel":
            await queue.cancel(["a"])
        case "refused":
            refused = await queue.put([make_request("d")], ahead=may_wait(seconds=29))
            assert refused == TooFarBehind("realtime", Backlog(3, 30, 6))
    left = {"put": 4, "claim": 2, "cancel": 2, "refused": 3}[move]
    assert await queue.backlogs(["realtime"]) == {"realtime": Backlog(left, 10 * left, 2 * left)}
    await queue.cancel(list("abcd"))


@pytest.mark.trap(13)
async def test_trap_13_a_request_is_one_member_of_a_sorted_set(queue: RedisQueue, redis_client: Redis) -> None:
    """Moving one of a thousand requests writes one member, not the whole queue."""
    await queue.put([make_request(f"r{n}", tokens=3, output=8) for n in range(1000)])
    assert await redis_client.type(Keys.of(redis_client).queue + "realtime") == b"zset"
    members = await redis_client.zrange(Keys.of(redis_client).queue + "realtime", 0, -1)
    assert sorted(m.decode().split(":", 3)[3] for m in members) == sorted(f"r{n}" for n in range(1000))
    assert max(map(len, members)) < 32, "a member contains the id, not the request"
    before = set(members)
    [claimed] = await queue.claim({"realtime": 1}, 5)
    left = set(await redis_client.zrange(Keys.of(redis_client).queue + "realtime", 0, -1))
    assert left < before and len(before - left) == 1
    await queue.ack([lease_of(claimed)])
    await queue.cancel([f"r{n}" for n in range(1000)])


async def test_only_a_claim_or_a_wait_starts_the_listener(queue: RedisQueue, redis_client: Redis) -> None:
    await queue.put([make_request("a")])
    await queue.cancel(["a"])
    assert await subscribers(redis_client) == 0
    await queue.claim({"realtime": 1}, 5)
    await until(lambda: _subscribed(redis_client, 1))
    await queue.close()
    await until(lambda: _subscribed(redis_client, 0))


async def test_the_listener_survives_a_lost_connection(queue: RedisQueue, redis_client: Redis) -> None:
    assert await queue.wait_for_work(5) is True  # the subscription's own wake-up
    await redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    assert await queue.wait_for_work(5) is True, "something may have been missed meanwhile"
    await until(lambda: _subscribed(redis_client, 1))
    await queue.claim({"realtime": 2}, 5, 0)
    await queue.put([make_request("a")])
    assert await queue.wait_for_work(5) is True
    assert ids(await queue.claim({"realtime": 1}, 5, 0)) == ["a"]
    await queue.cancel(["a"])


async def test_gateways_of_the_release_before_wake_a_worker_and_tell_it_what_was_cancelled(
    queue: RedisQueue, redis_client: Redis
) -> None:
    assert await queue.wait_for_work(5) is True  # the subscriptions' own wake-ups
    while await queue.wait_for_work(0.1):
        pass
    await redis_client.publish(Keys.of(redis_client).wake_all, "wake")
    assert await queue.wait_for_work(5) is True
    await redis_client.publish(Keys.of(redis_client).wake_all, "cancel:a")
    await until(lambda: queue.cancelled() == ["a"])


async def test_put_and_claim_are_one_call_each(queue: RedisQueue, redis_client: Redis) -> None:
    await queue.put([make_request("warm")])
    await queue.claim({"realtime": 1}, 5)
    await queue.cancel(["warm"])
    await redis_client.config_resetstat()
    ids = [f"r{n}" for n in range(12)]
    for request_id in ids:
        ahead = may_wait(500, 1e9, 0.1, 0.1, "bulk", "batch")
        await queue.put([make_request(request_id, tokens=200)], limit=1000, ahead=ahead)
    for _ in range(3):
        assert len(await queue.claim({"realtime": 4, "bulk": 4, "batch": 4}, 5)) == 4
    assert (await redis_client.info("commandstats"))["cmdstat_evalsha"]["calls"] == 15
    await queue.cancel(ids)


async def _subscribed(client: Redis, count: int) -> bool:
    return await subscribers(client) == count


@pytest.mark.parametrize("payload", [b"\xc1", b"", b"\x81\xa2id\x01", b"\x91" * 9999])
async def test_a_request_that_cannot_be_read_is_claimed_with_its_reason_and_costs_its_neighbours_nothing(
    queue: RedisQueue, redis_client: Redis, payload: bytes
) -> None:
    await queue.put([make_request(name) for name in "abc"])
    await redis_client.hset(Keys.of(redis_client).request + "a", "payload", payload)
    assert await queue.head_arrivals(["realtime"]) == {}
    claimed = await queue.claim({"realtime": 3}, 5)
    assert ids(claimed) == ["a", "b", "c"] and {c.attempt for c in claimed} == {1}
    a, *others = claimed
    assert a.unreadable and not any(c.unreadable for c in others)
    assert (a.request.tier, a.request.reply_to, a.request.deadline_ms) == ("realtime", "gateway-1", START_MS + 1000)
    assert await queue.ack([lease_of(c) for c in claimed]) == [True] * 3


async def test_a_claim_whose_reply_was_lost_gets_the_same_requests_at_once(
    valkey_url: str, redis_client: Redis, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.1)
    async with StallingProxy(valkey_url, tmp_path / "s").serving() as proxy:
        client = connection.connect(proxy.url)
        queue = RedisQueue(client, clock, worker_id="w1")
        await queue.put([make_request(name) for name in "abcd"])
        [first] = await queue.claim({"realtime": 1}, 5)
        await redis_client.hset(Keys.of(redis_client).request + "b", "received", 7)
        proxy.lose_replies()
        claimed = await queue.claim({"realtime": 2}, 5)
        assert ids(claimed) == ["b", "c"] and {c.attempt for c in claimed} == {1}
        assert [c.num_received for c in claimed] == [7, 0]
        [last] = await queue.claim({"realtime": 2}, 5)
        assert await queue.ack([lease_of(c) for c in (first, *claimed, last)]) == [True] * 4
        await queue.close()
        await client.aclose()


async def test_a_claim_that_failed_is_sent_again_by_the_next_one(
    queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.put([make_request(name) for name in "abc"])
    send = queue._scripts.claim

    async def lose_reply(*args: Any) -> Any:
        await send(*args)
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(queue._scripts, "claim", lose_reply)
        with pytest.raises(ConnectionError):
            await queue.claim({"realtime": 2}, 5)
    await queue.cancel(["a"])
    assert ids(await queue.claim({"realtime": 2}, 5)) == ["b"], "what it still holds of the lost claim"
    assert ids(await queue.claim({"realtime": 2}, 5)) == ["c"]
    await queue.cancel(["b", "c"])
