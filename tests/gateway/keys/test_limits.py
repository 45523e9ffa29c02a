"""Limits of keys on a real store, in time that the test moves."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.identity import ApiKey
from gateway.keys.limits import LEASE_MS, KeyLimits
from gateway.protocol.errors import ApiError
from tests.scheduler.queue.harness import ManualClock


def key(**limits: Any) -> ApiKey:
    return ApiKey("k", b"", **limits)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def refused() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def limits(redis_client: Redis, clock: ManualClock, refused: list[tuple[str, str]]) -> KeyLimits:
    return KeyLimits(redis_client, clock, lambda *why: refused.append(why))


async def refusal(limits: KeyLimits, of: ApiKey, tokens: int = 0, *ids: str) -> ApiError:
    with pytest.raises(ApiError) as error:
        await limits.reserve(of, tokens, ids)
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return error.value


async def test_requests_of_a_minute_and_the_way_back(
    limits: KeyLimits, clock: ManualClock, refused: list[tuple[str, str]]
) -> None:
    three = key(requests_per_minute=3)
    left = [(await limits.reserve(three, 0)).headers["x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == ["2", "1", "0"]
    clock.advance(5)
    error = await refusal(limits, three)
    assert error.type == "requests"
    assert error.headers == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "55s",
        "retry-after": "15",
        "retry-after-ms": "15000",
    }
    assert "limit 3, left 0, requested 1. Try again in 15s." in error.message
    assert refused == [("k", "requests")]
    clock.advance(14.9)
    await refusal(limits, three)
    clock.advance(0.1)
    assert (await limits.reserve(three, 0)).headers["x-ratelimit-remaining-requests"] == "0"


async def test_tokens_are_reserved_and_then_corrected(limits: KeyLimits, clock: ManualClock) -> None:
    thousand = key(tokens_per_minute=1000)
    first = await limits.reserve(thousand, 700, ["a"])
    assert first.headers == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "300",
        "x-ratelimit-reset-tokens": "42s",
    }
    error = await refusal(limits, thousand, 400, "b")
    assert (error.type, error.headers["retry-after"]) == ("tokens", "6")
    await limits.settle(first, 100)
    assert (await limits.reserve(thousand, 400, ["b"])).headers["x-ratelimit-remaining-tokens"] == "500"


async def test_what_was_used_beyond_the_reservation_is_paid_back(limits: KeyLimits, clock: ManualClock) -> None:
    sixty = key(tokens_per_minute=60)
    await limits.settle(await limits.reserve(sixty, 10, ["a"]), 100)
    error = await refusal(limits, sixty, 1, "b")
    assert (error.headers["x-ratelimit-remaining-tokens"], error.headers["retry-after"]) == ("0", "41")
    clock.advance(41)
    await limits.reserve(sixty, 1, ["b"])


async def test_all_or_nothing_is_taken(limits: KeyLimits) -> None:
    both = key(requests_per_minute=2, tokens_per_minute=100, concurrent_requests=9)
    await limits.reserve(both, 60, ["a"])
    assert (await refusal(limits, both, 60, "b")).type == "tokens"
    again = await limits.reserve(both, 40, ["c"])
    assert again.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await refusal(limits, both, 0, "d")).type == "requests"


async def test_open_requests_are_limited_until_they_end(limits: KeyLimits) -> None:
    two = key(concurrent_requests=2)
    first, _ = await limits.reserve(two, 5, ["a"]), await limits.reserve(two, 5, ["b"])
    error = await refusal(limits, two, 5, "c")
    assert (error.type, error.headers["retry-after"]) == ("requests", "1")
    assert "2 choices" in error.message
    await limits.settle(first, 5)
    await limits.reserve(two, 5, ["c"])


async def test_each_choice_of_each_prompt_is_an_open_request(limits: KeyLimits, refused: list[tuple[str, str]]) -> None:
    four = key(concurrent_requests=4)
    first = await limits.reserve(four, 5, ("a0", "a1", "a2"))
    assert (await refusal(limits, four, 5, "b0", "b1")).headers["retry-after"] == "1"
    await limits.reserve(four, 5, ["c0"])
    await limits.settle(first, 5)
    await limits.reserve(four, 5, ("b0", "b1"))
    never = await refusal(limits, four, 5, *"defgh")
    assert never.headers["x-should-retry"] == "false" and "5 choices" in never.message
    assert "Try again" not in never.message  # it would be refused then, too
    assert refused == 2 * [("k", "requests")]


@pytest.mark.parametrize("back_s", [30, 3600])
async def test_a_clock_that_is_set_back_delays_nobody_by_more_than_a_minute(
    limits: KeyLimits, clock: ManualClock, back_s: float
) -> None:
    one = key(requests_per_minute=1, concurrent_requests=1)
    await limits.reserve(one, 0, ["of a gateway that died"])
    clock.advance(-back_s)
    await refusal(limits, one)
    clock.advance(120 if back_s > 60 else back_s + 60)
    await limits.reserve(one, 0, ["next"])


async def test_the_place_of_a_dead_gateway_is_free_again_and_renewed_ones_are_not(
    limits: KeyLimits, clock: ManualClock
) -> None:
    one = key(concurrent_requests=1)
    await limits.reserve(one, 0, ["a"])
    clock.advance(LEASE_MS / 1000 - 1)
    await limits._renew_all()
    clock.advance(LEASE_MS / 1000 - 1)
    await refusal(limits, one, 0, "b")
    clock.advance(2)
    await limits.reserve(one, 0, ["b"])


async def test_calls_that_are_sent_again_take_and_return_nothing_more(limits: KeyLimits, redis_client: Redis) -> None:
    limited = key(requests_per_minute=10, tokens_per_minute=100)
    first = await limits.reserve(limited, 50, ["a"])
    again = await limits.reserve(limited, 50, ["a"])
    assert again.headers == first.headers
    for _ in range(2):
        await limits.settle(first, 0)
    other = KeyLimits(redis_client, limits._clock, lambda *why: None)
    assert (await other.reserve(limited, 0)).headers["x-ratelimit-remaining-tokens"] == "100"


async def test_a_script_that_is_sent_again_returns_nothing_more(
    limits: KeyLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py sends a script again when its reply is lost."""
    limited, settle = key(tokens_per_minute=100), limits._settle

    async def twice(**call: Any) -> Any:
        await settle(**call)
        return await settle(**call)

    monkeypatch.setattr(limits, "_settle", twice)
    first = await limits.reserve(limited, 30, ["a"])
    await limits.reserve(limited, 60, ["b"])
    await limits.settle(first, 0)
    assert (await limits.reserve(limited, 0)).headers["x-ratelimit-remaining-tokens"] == "40"


async def test_a_long_pause_fills_a_bucket_and_no_more(limits: KeyLimits, clock: ManualClock) -> None:
    three = key(requests_per_minute=3)
    await limits.reserve(three, 0)
    clock.advance(3600)
    assert (await limits.reserve(three, 0)).headers["x-ratelimit-remaining-requests"] == "2"


async def test_no_name_of_a_key_is_that_of_other_limits(limits: KeyLimits) -> None:
    names = ("a", "a:open", "a:open:open", "a%3Aopen", "ä b")
    keys = [ApiKey(name, b"", requests_per_minute=5, concurrent_requests=5) for name in names]
    for number in range(2):
        for one in keys:
            left = (await limits.reserve(one, 0, [f"{number}"])).headers["x-ratelimit-remaining-requests"]
            assert left == str(4 - number), one.name


async def test_gateways_share_the_limits(redis_client: Redis, clock: ManualClock) -> None:
    gateways = [KeyLimits(redis_client, clock, lambda *why: None) for _ in range(3)]
    ten = key(requests_per_minute=10)
    takes = await asyncio.gather(*(g.reserve(ten, 0) for g in gateways for _ in range(7)), return_exceptions=True)
    assert sum(not isinstance(take, ApiError) for take in takes) == 10


@given(
    calls=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(0, 80)), min_size=1, max_size=25),
    limit=st.integers(1, 90),
)
async def test_no_minute_sees_more_than_a_full_bucket_and_a_refill(
    redis_client: Redis, calls: list[tuple[int, int, int]], limit: int
) -> None:
    """Each call is (seconds since the last one, tokens reserved, tokens used)."""
    await redis_client.flushall()
    clock = ManualClock()
    limits, limited = KeyLimits(redis_client, clock, lambda *why: None), key(tokens_per_minute=limit)
    begin_s, settled, largest = clock.now(), 0, 0
    for number, (pause_s, reserved, used) in enumerate(calls):
        clock.advance(pause_s)
        outcome: Any = await asyncio.gather(limits.reserve(limited, reserved, [str(number)]), return_exceptions=True)
        if not isinstance(outcome[0], ApiError):
            await limits.settle(outcome[0], used)
            settled, largest = settled + used, max(largest, used)
    # Only the last request can go beyond its reservation unpunished.
    assert settled <= limit + limit * (clock.now() - begin_s) / 60 + largest + 1
