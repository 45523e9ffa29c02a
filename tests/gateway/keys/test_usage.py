"""Usage counts: in memory, in the store, and over several gateways and days."""

import asyncio
from datetime import date
from itertools import count
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreUnreachable

from gateway.http.metrics import GatewayMetrics
from gateway.keys.usage import Owner, UsageMeter, UsageRow, Use, total
from gateway.store_keys import GatewayKeys
from tests.scheduler.queue.harness import ManualClock

CHAT = Use(requests=1, prompt_tokens=10, cached_prompt_tokens=4, completion_tokens=5)


def meter_on(redis: Redis, clock: ManualClock | None = None, metrics: GatewayMetrics | None = None) -> UsageMeter:
    return UsageMeter(redis, metrics or GatewayMetrics(), clock or ManualClock())


async def test_counts_add_up_over_gateways_and_restarts(redis_client: Redis) -> None:
    for _ in range(2):
        meter = meter_on(redis_client)
        meter.record(Owner("web"), "realtime", CHAT)
        meter.record(Owner("web"), "bulk", CHAT)
        meter.record(Owner(), "bulk", CHAT)
        await meter.flush()
    [rows] = (await meter_on(redis_client).days(1)).values()
    twice = Use(requests=2, prompt_tokens=20, cached_prompt_tokens=8, completion_tokens=10)
    assert rows == [UsageRow(None, "bulk", twice), UsageRow("web", "bulk", twice), UsageRow("web", "realtime", twice)]


async def test_each_day_has_its_own_counts(redis_client: Redis) -> None:
    clock = ManualClock()
    meter = meter_on(redis_client, clock)
    meter.record(Owner("web"), "bulk", CHAT)
    clock.advance(86_400)
    meter.record(Owner("web"), "bulk", CHAT)
    meter.record(Owner("web"), "bulk", CHAT)
    days = await meter.days(3)
    assert [[row.use.requests for row in rows] for rows in days.values()] == [[2], [1], []]
    assert list(days) == ["2023-11-15", "2023-11-14", "2023-11-13"]
    assert [row.use.requests for row in total(days)] == [3]


async def test_answers_that_end_while_the_store_is_away_wait_for_one_write_together(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, release, writes = meter_on(redis_client), asyncio.Event(), count()

    async def is_away(*args: Any) -> None:
        next(writes)
        await release.wait()
        raise StoreUnreachable

    monkeypatch.setattr(UsageMeter, "_send", is_away)
    ending = []
    for _ in range(10):
        meter.record(Owner("web"), "bulk", CHAT)
        ending.append(asyncio.create_task(meter.try_flush()))
        await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*ending)
    assert next(writes) == 1, "else each of them would wait for the store once more"
    monkeypatch.undo()
    [rows] = (await meter.days(1)).values()
    assert [row.use.requests for row in rows] == [10]


async def test_a_write_without_a_reply_is_repeated_and_counts_once(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, send = meter_on(redis_client), UsageMeter._send

    async def loses_the_reply(*args: Any) -> None:
        await send(*args)
        raise StoreUnreachable

    monkeypatch.setattr(UsageMeter, "_send", loses_the_reply)
    meter.record(Owner("web"), "bulk", CHAT)
    await meter.try_flush()
    meter.record(Owner("web"), "bulk", CHAT)
    await meter.try_flush()
    monkeypatch.undo()
    [rows] = (await meter.days(1)).values()
    assert rows == [UsageRow("web", "bulk", Use(2, 20, 8, 10))]


async def test_a_gateways_writes_leave_one_key_behind(redis_client: Redis) -> None:
    meter = meter_on(redis_client)
    for _ in range(20):
        meter.record(Owner("web"), "bulk", CHAT)
        await meter.flush()
    keys = GatewayKeys.of(redis_client)
    today = keys.usage_of(date(2023, 11, 14))
    await meter._send(19, {(today, b"late"): 1})  # arrives after the twentieth, on a connection that was given up
    assert not await redis_client.hexists(today, "late")
    markers = [key async for key in redis_client.scan_iter(keys.usage_write("*"))]
    assert len(markers) == 1, "there was one for each write, for an hour"
    [rows] = (await meter.days(1)).values()
    assert [row.use.requests for row in rows] == [20]


async def test_answers_that_end_at_the_same_time_share_a_write(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, send, sizes = meter_on(redis_client), UsageMeter._send, []

    async def counted(self: UsageMeter, *args: Any) -> None:
        sizes.append(args[0])
        await send(self, *args)

    async def end(number: int) -> None:
        meter.record(Owner(f"k{number}"), "bulk", CHAT)
        await meter.flush()
        assert await redis_client.hexists(day, f'["k{number}","bulk","requests"]'), "it is written when this returns"

    day = GatewayKeys.of(redis_client).usage_of(date(2023, 11, 14))
    monkeypatch.setattr(UsageMeter, "_send", counted)
    await asyncio.gather(*(end(number) for number in range(32)))
    assert len(sizes) <= 2
    [rows] = (await meter.days(1)).values()
    assert [row.use for row in rows] == [CHAT] * 32
