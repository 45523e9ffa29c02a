"""Webhooks of batches from their end to their receiver, checked by the official client, on a real store."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import structlog
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.identity import ApiKey, Keyring, KeyWebhook
from gateway.jobs.webhooks import service
from gateway.jobs.webhooks.event import GIVE_UP_S, LONGEST_RETRY_S, Event, next_attempt_s
from gateway.jobs.webhooks.store import LEASE_S, EventStore
from gateway.store_keys import GatewayKeys
from tests.gateway.jobs.webhooks.receiver import Receiver, receiving
from tests.gateway.offline import OfflineGateway, jsonl, lines, make_gateway, running_gateway
from tests.waiting import until

SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="
OTHER = "whsec_" + "WllYV1ZVVFNSUVBPTk1MS0pJSEdGRURDQkE="


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "POLL_S", 0.01)


@asynccontextmanager
async def delivering(gateway: OfflineGateway) -> AsyncIterator[None]:
    task = asyncio.create_task(gateway.webhooks.follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    async with running_gateway(redis_client, tmp_path, webhook_secret=SecretStr(SECRET)) as gateway:
        yield gateway


def results(gateway: OfflineGateway) -> Counter[str]:
    """Return how many attempts had which result."""
    kinds = ("delivered", "retried", "gave_up")
    return +Counter({kind: int(gateway.metric("tidegate_webhook_attempts_total", result=kind)) for kind in kinds})


async def submit(gateway: OfflineGateway, url: str | None, entries: Any = None) -> str:
    """Create a batch with a webhook. Return its id."""
    file_id = await gateway.upload(jsonl(lines(2) if entries is None else entries))
    return (await gateway.create(file_id, metadata=None if url is None else {"webhook": url})).id


def unwrapped(got: tuple[dict[str, str], bytes], secret: str = SECRET) -> Any:
    headers, body = got
    with openai.OpenAI(api_key="-", base_url="http://localhost/v1") as client:
        return client.webhooks.unwrap(body, headers, secret=secret)


async def nothing_waits(redis: Redis) -> bool:
    keys = GatewayKeys.of(redis)
    return not await redis.keys(f"{keys.webhooks_due}*") and not await redis.keys(f"{keys.webhook}*")


async def test_the_official_client_takes_the_event_of_each_end(
    gateway: OfflineGateway, receiver: Receiver, redis_client: Redis
) -> None:
    async with delivering(gateway):
        completed, failed = await submit(gateway, receiver.url), await submit(gateway, receiver.url, [b"no JSON"])
        for batch_id in (completed, failed):
            await gateway.ended(batch_id)
        gateway.completions.permits = asyncio.Semaphore(0)
        cancelled, expired = await submit(gateway, receiver.url), await submit(gateway, receiver.url)
        await until(lambda: gateway.completions.running == 4)
        await gateway.client.batches.cancel(cancelled)
        await gateway.ended(cancelled)
        await until(lambda: len(receiver.got) == 3)
        gateway.clock.shift_s = 86_400
        await gateway.ended(expired)
        await until(lambda: len(receiver.got) == 4)
        await until(lambda: results(gateway) == {"delivered": 4})  # counted after the event is removed
        assert await nothing_waits(redis_client)
    gateway.clock.shift_s = 0
    events = [unwrapped(got) for got in receiver.got[:3]]
    assert {(event.type, event.data.id) for event in events} == {
        ("batch.completed", completed),
        ("batch.failed", failed),
        ("batch.cancelled", cancelled),
    }
    assert all(event.object == "event" and event.id.startswith("evt_") for event in events)
    assert [headers["webhook-id"] for headers, _ in receiver.got[:3]] == [event.id for event in events]
    assert b'"batch.expired"' in receiver.got[3][1] and expired.encode() in receiver.got[3][1]


async def test_what_is_not_taken_is_sent_again_with_the_same_id(
    gateway: OfflineGateway, receiver: Receiver, redis_client: Redis
) -> None:
    receiver.statuses = [500, 302, 204]
    with structlog.testing.capture_logs() as logs:
        async with delivering(gateway):
            await gateway.ended(await submit(gateway, receiver.url))
            await until(lambda: results(gateway) == {"retried": 1})
            gateway.clock.shift_s = 10
            await until(lambda: results(gateway) == {"retried": 2})
            gateway.clock.shift_s = 60
            await until(lambda: results(gateway) == {"retried": 2, "delivered": 1})
            assert await nothing_waits(redis_client)
    ids = {headers["webhook-id"] for headers, _ in receiver.got}
    assert len(ids) == 1 and len({body for _, body in receiver.got}) == 1
    warnings = [entry for entry in logs if "webhook_id" in entry]
    assert [(entry["attempts"], entry["reason"]) for entry in warnings] == [(1, "status 500"), (2, "status 302")]


async def test_it_is_given_up_after_three_days_or_when_the_receiver_says_so(
    gateway: OfflineGateway, receiver: Receiver, redis_client: Redis
) -> None:
    receiver.statuses = [500, 500, 410]
    async with delivering(gateway):
        await gateway.ended(await submit(gateway, receiver.url))
        await until(lambda: results(gateway) == {"retried": 1})
        gateway.clock.shift_s = int(GIVE_UP_S)
        await until(lambda: results(gateway) == {"retried": 1, "gave_up": 1})
        gateway.clock.shift_s = 0
        await gateway.ended(await submit(gateway, receiver.url))
        await until(lambda: results(gateway) == {"retried": 1, "gave_up": 2})
        await until(lambda: nothing_waits(redis_client))


async def test_deliveries_go_on_after_an_error_that_nobody_expects(
    gateway: OfflineGateway, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, claim = (
        [ValueError("a record that cannot be read"), RedisError("an answer that nobody knows")],
        EventStore.claim,
    )

    async def failing(self: EventStore, *args: Any) -> list[Event]:
        if faults:
            raise faults.pop()
        return await claim(self, *args)

    monkeypatch.setattr(EventStore, "claim", failing)
    async with delivering(gateway):
        await gateway.ended(await submit(gateway, receiver.url))
        await until(lambda: results(gateway) == {"delivered": 1})


async def test_another_gateway_delivers_what_a_dead_one_had_taken(
    gateway: OfflineGateway, receiver: Receiver, redis_client: Redis, tmp_path: Path
) -> None:
    receiver.answers.clear()
    async with delivering(gateway):
        await gateway.ended(await submit(gateway, receiver.url))
        await until(lambda: len(receiver.got) == 1)
    receiver.answers.set()
    other = make_gateway(redis_client, tmp_path / "other", webhook_secret=SecretStr(SECRET), clock=gateway.clock)
    async with delivering(other):
        assert not results(other)
        gateway.clock.shift_s = int(LEASE_S) + 1
        await until(lambda: results(other) == {"delivered": 1})
    assert receiver.got[0][1] == receiver.got[1][1]
    await other.http.aclose()


async def test_a_key_has_its_own_secret_and_url(redis_client: Redis, tmp_path: Path, receiver: Receiver) -> None:
    async with receiving() as named:
        webhook = KeyWebhook(OTHER, receiver.url)
        secret = "sk-one"
        keys = Keyring([ApiKey("one", hashlib.sha256(secret.encode()).digest(), webhook=webhook)])
        async with running_gateway(redis_client, tmp_path, keys=keys) as gateway, delivering(gateway):
            one = gateway.as_key("one")
            await one.ended(await submit(one, None))
            await until(lambda: len(receiver.got) == 1)
            await one.ended(await submit(one, named.url))
            await until(lambda: len(named.got) == 1)
        assert len(receiver.got) == 1
        for got in (receiver.got[0], named.got[0]):
            assert unwrapped(got, OTHER).type == "batch.completed"


async def test_without_a_secret_a_webhook_is_refused(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path) as gateway:
        with pytest.raises(openai.BadRequestError, match="TIDEGATE_WEBHOOK_SECRET") as refused:
            await submit(gateway, "https://example.com/hook")
        assert refused.value.param == "metadata.webhook"
        assert [batch async for batch in gateway.client.batches.list()] == []


@pytest.mark.parametrize("url", ["http://example.com", "https://10.0.0.1/", "nonsense", "https://u:p@example.com/"])
async def test_a_url_that_may_not_be_called_is_refused_at_creation(gateway: OfflineGateway, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await submit(gateway, url)
    assert (refused.value.param, refused.value.code) == ("metadata.webhook", "invalid_value")


async def test_owners_take_turns_when_all_are_full(redis_client: Redis) -> None:
    store = EventStore(redis_client)
    for owner, number in [("ann", 6), ("ben", 6), (None, 1)]:
        for n in range(number):
            await store.add(Event(f"evt_{owner}{n}", "batch.completed", "batch_1", 0, "https://a.test/", owner), n)
    taken = await store.claim(1000, 4, 5, {"ann": 3})
    assert Counter(event.owner for event in taken) == {None: 1, "ben": 3}
    assert [event.id for event in taken if event.owner == "ben"][:2] == ["evt_ben0", "evt_ben1"], "those due first"
    rest = await store.claim(1000, 64, 5, {})
    assert Counter(event.owner for event in rest) == {"ann": 5, "ben": 3}, "up to the limit of an owner"
    assert not {event.id for event in rest} & {event.id for event in taken}
    for event in (*taken, *rest):
        await store.remove(event)
    left = await store.claim(1000, 64, 64, {})
    for event in left:
        await store.remove(event)
    assert await store.claim(1000, 64, 64, {}) == []
    assert not await redis_client.exists(GatewayKeys.of(redis_client).webhook_owners)


def test_pauses_grow_and_end() -> None:
    event, now_s, pauses = Event("evt_1", "batch.completed", "batch_1", 0, "https://example.com"), 0.0, list[float]()
    while (at_s := next_attempt_s(event, now_s)) is not None:
        pauses.append(at_s - now_s)
        event, now_s = replace(event, attempts=event.attempts + 1), at_s
    assert 5 <= pauses[0] <= 6 and pauses == sorted(pauses[:6]) + pauses[6:]
    assert max(pauses) <= 1.1 * LONGEST_RETRY_S and 15 < len(pauses) < 40
    assert GIVE_UP_S - 2 * LONGEST_RETRY_S < now_s < GIVE_UP_S
