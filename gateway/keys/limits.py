"""The limits and budgets of API keys, shared by all gateways of a store.

Each limit per minute is a token bucket: it holds at most what one minute allows, and is refilled continuously. A bucket
needs two numbers for any number of requests, tells exactly when there will be room again, and tokens that were reserved
can be returned to it; a sliding window would have to remember each request of the last minute. One script takes from
both buckets and from the budgets at once. The libraries for this (limits, pyrate-limiter) check one limit after the
other, and return nothing, so that a request could be charged without being served.

A request reserves its prompt and its maximum of output tokens. When it ends, also when its client has hung up, the
reservation is replaced by what it has used. A gateway renews the leases of its open requests, so that those of a dead
gateway do not count for long. A budget is charged with the reservation, and the charge is corrected in the write that
also counts the usage (gateway/keys/usage.py): what a dead gateway has not corrected stays charged. If the store does
not answer, the store's errors are raised, as everywhere: no request can be served then.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.identity import ApiKey, Budget, Holder, Project
from gateway.keys.prices import NANO
from gateway.keys.refusals import FINAL, Levels, budget_spent, headers_of, refusal, too_many_choices, too_many_tokens
from gateway.store_keys import DAY_S, USAGE_DAYS, GatewayKeys, spender, utc_day
from scheduler.clock import Clock
from scheduler.store.scripts import load_script

log = structlog.get_logger(__name__)

LEASE_MS = 30_000  # for so long, an open request counts if its gateway does not renew it
RENEW_S = 10.0  # seconds between two renewals; two may fail

NO_BUDGET = Budget()


@dataclass(frozen=True, slots=True)
class Charge:
    """What an open request is charged of budgets, those of the day and the month of `at_ms`."""

    at_ms: int
    tokens: int
    cost_nano: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What an admitted request has reserved. `headers` tell the caller what is left.

    `ids` has one for each choice of each prompt; it is empty if the reservation needs no end. `charge` is None if there
    is no budget.
    """

    key: ApiKey
    ids: tuple[str, ...]
    tokens: int
    headers: dict[str, str] = field(default_factory=dict)
    charge: Charge | None = None


class KeyLimits:
    """The limits of all keys, as one gateway enforces them. `on_refused` gets the key's name and what was lacking."""

    def __init__(self, redis: Redis, clock: Clock, on_refused: Callable[[str, str], None]) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._clock = clock
        self._on_refused = on_refused
        self._reserve = load_script(redis, "gateway.keys", "buckets", "reserve")
        self._settle = load_script(redis, "gateway.keys", "buckets", "settle")
        self._open: dict[str, Reservation] = {}

    async def reserve(self, key: ApiKey, tokens: int, ids: Sequence[str] = (), cost_nano: int = 0) -> Reservation:
        """Reserve one request, `tokens`, `cost_nano`, and a place for each of `ids`, of the limits of `key`.

        `ids` are those of the choices of all prompts. A reservation with ids is open until it is given to `settle`.
        Without ids, nothing is generated, so that budgets do not count; a call whose reply is lost may take a second
        request. Raises `ApiError` 429 if a limit is reached.
        """
        for holder in key.holders:
            self._check_size(key, holder, tokens, len(ids))
        if all(holder.concurrent_requests is None for holder in key.holders):  # one place is enough to return tokens
            needs_end = any(h.tokens_per_minute is not None or h.budget is not None for h in key.holders)
            ids = ids[:1] if needs_end else ()
        has_budget = bool(ids) and any(holder.budget is not None for holder in key.holders)
        charge = Charge(self._clock.wall_ms(), tokens, cost_nano) if has_budget else None
        headers = await self._take(key, tokens, ids, charge)
        reservation = Reservation(key, tuple(ids), tokens, headers, charge)
        if ids:
            self._open[ids[0]] = reservation
        return reservation

    async def check_budget(self, key: ApiKey) -> None:
        """Check that something is left of the budgets of `key`, for what is charged when it ends.

        Raises `ApiError` 429 if nothing is left.
        """
        now_ms = self._clock.wall_ms()
        unlimited = [_limits(holder, has_rates=False, has_budget=True) for holder in key.holders]
        await self._call_reserve(key, {"tokens": 0, "cost": 0, "ids": (), "takes": False, "holders": unlimited}, now_ms)

    def _check_size(self, key: ApiKey, holder: Holder, tokens: int, num_choices: int) -> None:
        """Raise `ApiError` 429 for a request that would be beyond a limit at any time."""
        if holder.tokens_per_minute is not None and tokens > holder.tokens_per_minute:
            self._on_refused(key.name, "tokens")
            raise too_many_tokens(holder, holder.tokens_per_minute, tokens)
        if holder.concurrent_requests is not None and num_choices > holder.concurrent_requests:
            self._on_refused(key.name, "requests")
            raise too_many_choices(holder, num_choices, FINAL)

    async def _take(self, key: ApiKey, tokens: int, ids: Sequence[str], charge: Charge | None) -> dict[str, str]:
        """Take from all limits of `key` and return the headers of what is left. `charge` counts for its budgets."""
        limits = [_limits(holder, has_rates=True, has_budget=charge is not None) for holder in key.holders]
        cost = 0 if charge is None else charge.cost_nano
        call = {
            "tokens": tokens,
            "cost": cost,
            "ids": ids,
            "takes": True,
            "charges": charge is not None,
            "holders": limits,
        }
        return await self._call_reserve(key, call, self._clock.wall_ms() if charge is None else charge.at_ms)

    async def _call_reserve(self, key: ApiKey, call: dict[str, Any], now_ms: int) -> dict[str, str]:
        call |= {"now_ms": now_ms, "lease_ms": LEASE_MS, "spent_s": USAGE_DAYS * DAY_S}
        keys = [*self._keys_of(key), *self._keys.spent_in(utc_day(now_ms))]
        lacking, number, left, *texts = await self._reserve(keys=keys, args=[json.dumps(call)])
        pairs = zip(key.holders, texts[::2], texts[1::2], strict=True)
        levels = [Levels(holder, float(requests), float(tokens)) for holder, requests, tokens in pairs]
        if lacking == b"ok":
            return headers_of(levels)
        holder, kind = key.holders[number - 1], lacking.decode()
        if "_per_" in kind:
            self._on_refused(key.name, "budget")
            wanted = call["cost" if kind.startswith("cost") else "tokens"]
            raise budget_spent(holder, kind, int(left), wanted, now_ms)
        self._on_refused(key.name, "requests" if kind == "open" else kind)
        raise refusal(levels, holder, kind, call["tokens"], len(call["ids"]))

    async def settle(self, reservation: Reservation, used_tokens: int) -> None:
        """End an open request, which has used `used_tokens`.

        If the store does not answer, the place is free when its lease expires, and the bucket fills again by itself.
        """
        if not reservation.ids or self._open.pop(reservation.ids[0], None) is None:
            return
        key, unused = reservation.key, reservation.tokens - used_tokens
        limits = [_limits(holder, has_rates=True, has_budget=False) for holder in key.holders]
        call = {"now_ms": self._clock.wall_ms(), "tokens": unused, "ids": reservation.ids, "holders": limits}
        try:
            await self._settle(keys=self._keys_of(key), args=[json.dumps(call)])
        except RedisError as error:
            log.warning("reserved tokens are not returned", key=key.name, error=str(error))

    async def renew(self) -> None:
        """Renew the leases of this gateway's open requests every `RENEW_S` seconds, for ever."""
        while True:
            await self._clock.sleep(RENEW_S)
            try:
                await self._renew_all()
            except RedisError as error:
                log.warning("open requests are not renewed", error=str(error))

    async def _renew_all(self) -> None:
        if not self._open:
            return
        expires_ms, pipeline = self._clock.wall_ms() + LEASE_MS, self._redis.pipeline(transaction=False)
        for reservation in self._open.values():
            for places in self._keys_of(reservation.key)[1::2]:
                pipeline.zadd(places, dict.fromkeys(reservation.ids, expires_ms), xx=True)
                pipeline.pexpire(places, LEASE_MS)
        await pipeline.execute()

    def _keys_of(self, key: ApiKey) -> list[str]:
        """Return the keys of the buckets and of the open requests of each holder."""
        named = [self._keys.project_limits if isinstance(h, Project) else self._keys.limits for h in key.holders]
        buckets = [before + quote(holder.name, safe="") for before, holder in zip(named, key.holders, strict=True)]
        return [name for one in buckets for name in (one, self._keys.open_requests(one))]


def _limits(holder: Holder, *, has_rates: bool, has_budget: bool) -> dict[str, Any]:
    """Return the limits of a holder for the scripts. Those that do not count are 0."""
    rates = (holder.requests_per_minute, holder.tokens_per_minute, holder.concurrent_requests)
    requests, tokens, places = (limit or 0 if has_rates else 0 for limit in rates)
    budget = (holder.budget if has_budget else None) or NO_BUDGET
    return {
        "requests": requests,
        "tokens": tokens,
        "open": places,
        "spender": spender(holder.name, isinstance(holder, Project)),
        "budget": [
            {"tokens": budget.tokens_per_day or 0, "cost": round((budget.cost_per_day or 0) * NANO)},
            {"tokens": budget.tokens_per_month or 0, "cost": round((budget.cost_per_month or 0) * NANO)},
        ],
    }
