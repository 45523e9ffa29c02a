"""The limits of API keys: requests and tokens per minute, and open choices, shared by all gateways of a store.

Each limit per minute is a token bucket: it holds at most what one minute allows, and is refilled continuously. A bucket
needs two numbers for any number of requests, tells exactly when there will be room again, and tokens that were reserved
can be returned to it; a sliding window would have to remember each request of the last minute. One script takes from
both buckets at once. The libraries for this (limits, pyrate-limiter) check one limit after the other, and return
nothing, so that a request could be charged without being served.

A request reserves its prompt and its maximum of output tokens. When it ends, also when its client has hung up, the
reservation is replaced by what it has used. A gateway renews the leases of its open requests, so that those of a dead
gateway do not count for long. If the store does not answer, the store's errors are raised, as everywhere: no request
can be served then.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.identity import ApiKey
from gateway.protocol.errors import ApiError, retry_after
from gateway.store_keys import GatewayKeys
from scheduler.clock import Clock
from scheduler.store.scripts import load_script

log = structlog.get_logger(__name__)

LEASE_MS = 30_000  # for so long, an open request counts if its gateway does not renew it
RENEW_S = 10.0  # seconds between two renewals; two may fail
BUSY_RETRY_S = 1.0  # seconds of Retry-After if too many requests are open: nobody knows when one of them ends

NO_HEADERS: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Reservation:
    """What an admitted request has reserved. `headers` tell the caller what is left.

    `ids` has one for each choice of each prompt; it is empty if the reservation needs no end.
    """

    key: ApiKey
    ids: tuple[str, ...]
    tokens: int
    headers: dict[str, str] = field(default_factory=dict)


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

    async def reserve(self, key: ApiKey, tokens: int, ids: Sequence[str] = ()) -> Reservation:
        """Reserve one request, `tokens`, and a place for each of `ids` of the limits of `key`.

        `ids` are those of the choices of all prompts. A reservation with ids is open until it is given to `settle`.
        Without ids, a call whose reply is lost may take a second request. Raises `ApiError` 429 if a limit is reached.
        """
        if key.tokens_per_minute is not None and tokens > key.tokens_per_minute:
            self._on_refused(key.name, "tokens")
            raise _too_many_tokens(key, key.tokens_per_minute, tokens)
        if key.concurrent_requests is not None and len(ids) > key.concurrent_requests:
            self._on_refused(key.name, "requests")
            raise _too_many_choices(key.concurrent_requests, len(ids), {"x-should-retry": "false"})
        if key.concurrent_requests is None:  # one place is enough to return tokens
            ids = ids[:1] if key.tokens_per_minute is not None else ()
        args: list[int | str] = [*self._limits(key), tokens, LEASE_MS, *ids]
        lacking, *texts = await self._reserve(keys=self._keys_of(key), args=args)
        requests_left, tokens_left = map(float, texts)
        levels = _Levels(key, requests_left, tokens_left)
        if lacking != b"ok":
            self._on_refused(key.name, "requests" if lacking == b"open" else lacking.decode())
            raise levels.refusal(lacking, tokens, len(ids))
        reservation = Reservation(key, tuple(ids), tokens, levels.headers)
        if ids:
            self._open[ids[0]] = reservation
        return reservation

    async def settle(self, reservation: Reservation, used_tokens: int) -> None:
        """End an open request, which has used `used_tokens`.

        If the store does not answer, the place is free when its lease expires, and the bucket fills again by itself.
        """
        if not reservation.ids or self._open.pop(reservation.ids[0], None) is None:
            return
        unused = reservation.tokens - used_tokens
        args: list[int | str] = [*self._limits(reservation.key), unused, *reservation.ids]
        try:
            await self._settle(keys=self._keys_of(reservation.key), args=args)
        except RedisError as error:
            log.warning("reserved tokens are not returned", key=reservation.key.name, error=str(error))

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
            places = self._keys.open_requests(reservation.key.name)
            pipeline.zadd(places, dict.fromkeys(reservation.ids, expires_ms), xx=True)
            pipeline.pexpire(places, LEASE_MS)
        await pipeline.execute()

    def _keys_of(self, key: ApiKey) -> list[str]:
        return [self._keys.limits + key.name, self._keys.open_requests(key.name)]

    def _limits(self, key: ApiKey) -> list[int]:
        limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrent_requests)
        return [self._clock.wall_ms(), *(limit or 0 for limit in limits)]


@dataclass(frozen=True, slots=True)
class _Levels:
    """The levels of a key's buckets after a script."""

    key: ApiKey
    requests: float
    tokens: float

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's headers for the limits that the key has. A limit is reset when its bucket is full again."""
        headers = {}
        for kind, limit, level in self._limited():
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(level)))
            headers[f"x-ratelimit-reset-{kind}"] = go_duration(60 * (limit - level) / limit)
        return headers

    def refusal(self, outcome: bytes, tokens: int, num_choices: int) -> ApiError:
        if outcome == b"open":
            headers = self.headers | retry_after(BUSY_RETRY_S)
            return _too_many_choices(self.key.concurrent_requests or 0, num_choices, headers)
        kind = outcome.decode()
        wanted = {"requests": 1, "tokens": tokens}
        wait_s = max(60 * (wanted[name] - level) / limit for name, limit, level in self._limited())
        limit, level = next((limit, level) for name, limit, level in self._limited() if name == kind)
        message = (
            f"Rate limit reached for {kind} per minute of this API key: limit {limit}, "
            f"left {max(0, math.floor(level))}, requested {wanted[kind]}. Try again in {go_duration(wait_s)}."
        )
        return _refused(kind, message, self.headers | retry_after(wait_s))

    def _limited(self) -> list[tuple[str, int, float]]:
        """Return (name, limit per minute, level) of each bucket of the key."""
        buckets = (
            ("requests", self.key.requests_per_minute, self.requests),
            ("tokens", self.key.tokens_per_minute, self.tokens),
        )
        return [(name, limit, level) for name, limit, level in buckets if limit is not None]


def _too_many_tokens(key: ApiKey, limit: int, tokens: int) -> ApiError:
    message = (
        f"Request too large for the tokens per minute of this API key: limit {limit}, requested {tokens} (prompt and "
        "maximum output). Shorten the prompt or lower the maximum of output tokens."
    )
    full = _Levels(key, key.requests_per_minute or 0, limit).headers
    headers = {name: value for name, value in full.items() if name.startswith("x-ratelimit-limit")}
    return _refused("tokens", message, headers | {"x-should-retry": "false"})


def _too_many_choices(limit: int, wanted: int, headers: dict[str, str]) -> ApiError:
    message = (
        f"This API key may have {limit} choices generated at the same time (prompts × n of all its open requests), and "
        f"this request has {wanted} choices. Try again when others have ended, or lower n."
    )
    return _refused("requests", message, headers)


def _refused(kind: str, message: str, headers: dict[str, str]) -> ApiError:
    return ApiError(429, message, kind, code="rate_limit_exceeded", headers=headers)


def go_duration(seconds: float) -> str:
    """Return a duration as Go prints it, which OpenAI's headers use: `120ms`, `1.5s`, `6m0s`. Rounded up to 1 ms."""
    milliseconds = math.ceil(round(1000 * seconds, 3))
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:g}s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text
