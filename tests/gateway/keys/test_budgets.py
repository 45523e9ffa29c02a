"""Budgets of keys and projects on a real store, in time that the test moves: charged, corrected, and reset."""

import asyncio
import random
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreUnreachable

from gateway.http.metrics import GatewayMetrics
from gateway.identity import ApiKey, Budget, Project
from gateway.keys.limits import KeyLimits, Reservation
from gateway.keys.prices import Price, PriceList
from gateway.keys.refusals import next_reset
from gateway.keys.usage import Owner, UsageMeter, Use
from gateway.protocol.errors import ApiError
from tests.scheduler.queue.harness import ManualClock

DAY_S = 86_400


class Part:
    """The limits and the usage of one gateway."""

    def __init__(self, redis: Redis, clock: ManualClock) -> None:
        self.limits = KeyLimits(redis, clock, lambda *why: None)
        self.usage = UsageMeter(redis, GatewayMetrics(), clock)

    async def reserve(self, key: ApiKey, tokens: int, request_id: str, cost_nano: int = 0) -> Reservation:
        return await self.limits.reserve(key, tokens, [request_id], cost_nano)

    async def end(self, reservation: Reservation, tokens: int, cost_nano: int = 0) -> None:
        project = reservation.key.project
        owner = Owner(reservation.key.name, None if project is None else project.name)
        use = Use(requests=1, completion_tokens=tokens, cost_nano=cost_nano)
        self.usage.record(owner, "realtime", use, reservation.charge, tokens)
        await self.usage.flush()
        await self.limits.settle(reservation, tokens)

    async def spent(self, field: str) -> tuple[int, int]:
        today, month = await self.usage.spent()
        return today.get(field, 0), month.get(field, 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def part(redis_client: Redis, clock: ManualClock) -> Part:
    return Part(redis_client, clock)


def key(name: str = "k", project: Project | None = None, **budget: Any) -> ApiKey:
    return ApiKey(name, b"", budget=Budget(**budget) if budget else None, project=project)


async def refusal(part: Part, of: ApiKey, tokens: int, cost_nano: int = 0) -> ApiError:
    with pytest.raises(ApiError) as error:
        await part.reserve(of, tokens, f"refused {random.random()}", cost_nano)
    assert (error.value.status, error.value.type, error.value.code) == (429, "insufficient_quota", "insufficient_quota")
    assert error.value.headers == {"x-should-retry": "false"}
    return error.value


async def test_a_budget_is_spent_says_when_it_is_reset_and_is_reset(part: Part, clock: ManualClock) -> None:
    daily = key(tokens_per_day=100)
    await part.end(await part.reserve(daily, 80, "a"), 60)
    error = await refusal(part, daily, 41)
    assert error.message == (
        "You exceeded the budget of this API key: 100 tokens per day, of which 40 is left, and this request may need "
        "41 (prompt and maximum output). It is reset at 2023-11-15T00:00:00Z, in 1h46m40s. An administrator of this "
        "server can raise `budget.tokens_per_day` of the key 'k'."
    )
    await part.end(await part.reserve(daily, 40, "b"), 40)
    await refusal(part, daily, 1)
    clock.advance(DAY_S)
    await part.reserve(daily, 100, "c")


async def test_a_month_outlasts_its_days_and_a_raised_budget_counts_at_once(part: Part, clock: ManualClock) -> None:
    monthly = key(tokens_per_month=100)
    await part.end(await part.reserve(monthly, 70, "a"), 70)
    clock.advance(DAY_S)
    assert "2023-12-01T00:00:00Z" in (await refusal(part, monthly, 31)).message
    await part.reserve(key(tokens_per_month=101), 31, "b")
    clock.advance(30 * DAY_S)
    await part.reserve(monthly, 100, "c")


async def test_money_is_counted_by_price(part: Part) -> None:
    price = Price(input=2.0, cached=0.5, output=8.0)
    assert price.cost_nano(1000, 400, 100) == 2_200_000  # 600 × 2, 400 × 0.5 and 100 × 8 of a millionth
    cheap = key(cost_per_day=0.01)
    await part.end(await part.reserve(cheap, 1, "a", 9_000_000), 1, 2_200_000)
    error = await refusal(part, cheap, 1, 7_800_001)
    assert "0.01 cost per day, of which 0.0078 is left" in error.message
    await part.reserve(cheap, 1, "b", 7_800_000)


async def test_the_first_price_that_fits_counts() -> None:
    bulk, model, rest = Price(1, 1, tier="bulk"), Price(2, 2, model="m"), Price(3, 3)
    prices = PriceList([bulk, model, rest])
    found = [prices.of(*names) for names in (("m", "bulk"), ("m", "realtime"), ("n", "realtime"))]
    assert found == [bulk, model, rest]
    assert PriceList([bulk]).of("m", "realtime").cost_nano(10, 0, 10) == 0


async def test_keys_of_a_project_share_its_budget_and_its_limits(part: Part) -> None:
    team = Project("team", budget=Budget(tokens_per_day=100), requests_per_minute=3)
    one, two, other = key("one", team), key("two", team, tokens_per_day=30), key("other")
    await part.end(await part.reserve(one, 50, "a"), 50)
    assert "of this API key: 30 tokens per day" in (await refusal(part, two, 31)).message
    await part.end(await part.reserve(two, 30, "b"), 30)
    assert "the project 'team' of this API key: 100 tokens per day" in (await refusal(part, one, 21)).message
    assert await part.spent("project:team:tokens") == (80, 80)
    assert await part.spent("key:two:tokens") == (30, 30)
    last = await part.reserve(one, 20, "c")
    assert last.headers["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(ApiError, match="per minute of the project 'team'"):
        await part.limits.reserve(two, 0)
    await part.limits.reserve(other, 0)


async def test_of_the_limits_of_key_and_project_the_nearer_one_is_shown(part: Part) -> None:
    both = ApiKey("k", b"", tokens_per_minute=100, project=Project("p", tokens_per_minute=1000))
    first = await part.reserve(both, 60, "a")
    assert (first.headers["x-ratelimit-limit-tokens"], first.headers["x-ratelimit-remaining-tokens"]) == ("100", "40")
    await part.reserve(ApiKey("other", b"", project=both.project), 938, "b")
    with pytest.raises(ApiError, match=r"project 'p' of this API key: limit 1000, left 2, requested 40"):
        await part.reserve(both, 40, "c")
    await part.limits.settle(first, 0)
    assert (await part.reserve(both, 40, "c")).headers["x-ratelimit-remaining-tokens"] == "22"


async def test_what_is_charged_at_its_end_needs_anything_that_is_left(part: Part) -> None:
    daily = key(tokens_per_day=10)
    await part.limits.check_budget(daily)
    part.usage.record(Owner("k"), "batch", Use(requests=1, completion_tokens=10), charged_tokens=10)
    await part.usage.flush()
    with pytest.raises(ApiError, match="10 tokens per day, of which 0 is left. It is reset"):
        await part.limits.check_budget(daily)


async def test_a_request_across_midnight_counts_for_the_day_in_which_it_began(part: Part, clock: ManualClock) -> None:
    daily = key(tokens_per_day=100)
    reservation = await part.reserve(daily, 90, "a")
    clock.advance(DAY_S)
    await part.end(reservation, 30)
    assert await part.spent("key:k:tokens") == (0, 30)
    await part.reserve(daily, 100, "b")
    clock.advance(-DAY_S)
    await part.reserve(daily, 70, "c")
    await refusal(part, daily, 1)


async def test_the_reservation_of_a_dead_gateway_stays_charged_and_a_late_end_still_counts_once(
    redis_client: Redis, part: Part, clock: ManualClock
) -> None:
    daily, dead = key(tokens_per_day=100), Part(redis_client, clock)
    await dead.reserve(daily, 40, "a")
    slow = await part.reserve(daily, 60, "b")
    clock.advance(3600)  # both leases have expired
    await refusal(part, daily, 1)
    await part.end(slow, 10)
    await part.reserve(daily, 50, "c")
    assert await part.spent("key:k:tokens") == (100, 100)


async def test_calls_whose_replies_are_lost_charge_and_return_once(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    daily, send = key(tokens_per_day=100), UsageMeter._send
    first = await part.reserve(daily, 60, "a")
    assert (await part.reserve(daily, 60, "a")).charge == first.charge

    async def loses_the_reply(*args: Any) -> None:
        await send(*args)
        raise StoreUnreachable

    part.usage.record(Owner("k"), "realtime", Use(requests=1), first.charge, 25)
    monkeypatch.setattr(UsageMeter, "_send", loses_the_reply)
    for _ in range(2):
        await part.usage.try_flush()
    monkeypatch.undo()
    assert await part.spent("key:k:tokens") == (25, 25)


async def test_what_is_spent_without_a_budget_is_what_was_used(part: Part) -> None:
    limited = ApiKey("k", b"", tokens_per_minute=100)
    await part.end(await part.reserve(limited, 60, "a"), 25)
    assert await part.spent("key:k:tokens") == (25, 25)


async def test_what_is_spent_and_used_is_forgotten_after_three_months(redis_client: Redis, part: Part) -> None:
    """Also what a gateway reserved that has died before it wrote anything."""

    async def lifetimes() -> list[int]:
        return [await redis_client.ttl(name) for name in await redis_client.keys("*spent:*")]

    reservation = await part.reserve(key(tokens_per_day=100), 60, "a")
    assert [ttl > 90 * DAY_S for ttl in await lifetimes()] == [True, True]
    await part.end(reservation, 25)
    [usage] = [name for name in await redis_client.keys("*usage:2*")]
    assert await redis_client.ttl(usage) > 90 * DAY_S


@pytest.mark.parametrize(
    ("now", "day", "month"),
    [
        ("2024-01-31T23:59:59", "2024-02-01", "2024-02-01"),
        ("2024-02-01T00:00:00", "2024-02-02", "2024-03-01"),
        ("2024-12-31T12:00:00", "2025-01-01", "2025-01-01"),
    ],
)
def test_days_and_months_end_at_midnight(now: str, day: str, month: str) -> None:
    found = [next_reset(datetime.fromisoformat(f"{now}+00:00"), period) for period in ("day", "month")]
    assert [reset.isoformat() for reset in found] == [f"{date}T00:00:00+00:00" for date in (day, month)]


async def test_gateways_never_admit_more_than_the_budget(redis_client: Redis, clock: ManualClock) -> None:
    gateways, daily = [Part(redis_client, clock) for _ in range(3)], key(tokens_per_day=100)
    wishes = [gateway.reserve(daily, 7, f"{n} {m}") for n, gateway in enumerate(gateways) for m in range(20)]
    taken = await asyncio.gather(*wishes, return_exceptions=True)
    assert sum(isinstance(one, Reservation) for one in taken) == 14


STEPS = st.tuples(st.sampled_from(["reserve", "end", "die", "next day"]), st.integers(0, 2), st.integers(0, 40))


@given(steps=st.lists(STEPS, max_size=30))
async def test_what_is_spent_is_what_was_used_and_what_is_reserved(
    redis_client: Redis, steps: list[tuple[str, int, int]]
) -> None:
    """Three gateways and two keys of a project. What a dead gateway had reserved stays charged."""
    await redis_client.flushall()
    clock = ManualClock()
    team = Project("team", budget=Budget(tokens_per_day=150))
    keys = [key("one", team, tokens_per_day=100), key("two", team)]
    parts: list[Part] = [Part(redis_client, clock) for _ in range(3)]
    under_way: list[list[Reservation]] = [[], [], []]
    expected = {"key:one": 0, "key:two": 0, "project:team": 0}
    for number, (step, of, tokens) in enumerate(steps):
        holder = keys[tokens % 2]
        if step == "reserve":
            [taken] = await asyncio.gather(parts[of].reserve(holder, tokens, str(number)), return_exceptions=True)
            fits = expected["project:team"] + max(1, tokens) <= 150
            fits &= holder.budget is None or expected[f"key:{holder.name}"] + max(1, tokens) <= 100
            assert isinstance(taken, Reservation) == fits
            if isinstance(taken, Reservation):
                under_way[of].append(taken)
                for spender in (f"key:{holder.name}", "project:team"):
                    expected[spender] += tokens
        elif step == "end" and under_way[of]:
            ended = under_way[of].pop()
            await parts[of].end(ended, tokens)
            assert ended.charge is not None
            is_today = ended.charge.at_ms // (1000 * DAY_S) == clock.ms // (1000 * DAY_S)
            for spender in (f"key:{ended.key.name}", "project:team"):
                expected[spender] += (tokens - ended.tokens) * is_today
        elif step == "die":
            parts[of], under_way[of] = Part(redis_client, clock), []
        elif step == "next day":
            clock.advance(DAY_S)
            expected = dict.fromkeys(expected, 0)
        for spender, amount in expected.items():
            assert (await parts[of].spent(f"{spender}:tokens"))[0] == amount
