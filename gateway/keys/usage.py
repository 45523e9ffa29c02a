"""What each API key has used: requests and tokens by tier, in /metrics and for each day in Redis.

Knows names of keys and tiers, and numbers; does not know requests. Counts are collected in memory and written to Redis
every few seconds, so that a request costs no round trip. All gateways add to the same days. A gateway that is killed
loses the counts of its last seconds.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.http.metrics import GatewayMetrics
from gateway.store_keys import DAY_S, USAGE_WRITE_S, GatewayKeys
from scheduler.clock import Clock
from scheduler.store.scripts import load_script

log = structlog.get_logger(__name__)

MAX_DAYS = 92  # days for which usage is kept, today included: three months
FLUSH_S = 2.0  # seconds between two writes to the store
NO_KEY = "-"  # label of requests without a key, with open access


@dataclass(frozen=True, slots=True)
class Use:
    """What one request, or many of them, have used.

    `cached_prompt_tokens` are those of the prompt tokens that came from the prefix cache or with a cached answer.
    Answers from the cache also count in `cached_answers`, and their output in `cached_completion_tokens`.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_answers: int = 0
    cached_completion_tokens: int = 0


NAMES = tuple(field.name for field in fields(Use))

# The label `kind` of each count of tokens in the metrics; empty for the other counts.
KINDS = {name: name.removesuffix("_tokens") if name.endswith("_tokens") else "" for name in NAMES}

Field = tuple[int, str | None, str, str]  # UTC day since 1970, key's name (None: open access), tier, name of the count


@dataclass(frozen=True, slots=True)
class UsageRow:
    key: str | None  # None: open access
    tier: str
    use: Use


class UsageMeter:
    """The counts of one gateway, and access to the sums over all gateways."""

    def __init__(self, redis: Redis, metrics: GatewayMetrics, clock: Clock) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._metrics = metrics
        self._clock = clock
        self._write = load_script(redis, "gateway.keys", "usage")
        self._pending: Counter[Field] = Counter()
        self._writing: tuple[str, Mapping[Field, int]] | None = None  # a write that may or may not have been done
        self._lock = asyncio.Lock()  # one write at a time

    def record(self, key: str | None, tier: str, use: Use) -> None:
        """Count what requests of a key (None: open access) have used in a tier."""
        today, label = self._today(), key or NO_KEY
        self._metrics.usage_requests.labels(label, tier).inc(use.requests)
        for name, kind in KINDS.items():
            if amount := getattr(use, name):
                self._pending[today, key, tier, name] += amount
                if kind:
                    self._metrics.usage_tokens.labels(label, tier, kind).inc(amount)

    async def follow(self) -> None:
        """Write the counts to the store every `FLUSH_S` seconds, for ever."""
        while True:
            await self._clock.sleep(FLUSH_S)
            await self.try_flush()

    async def try_flush(self) -> None:
        """Write the counts. If the store does not answer, keep them for the next time."""
        try:
            await self.flush()
        except RedisError as error:
            log.warning("usage is not written yet", error=str(error))

    async def flush(self) -> None:
        """Write all counts to the store. An earlier write without a reply is repeated first, with its own id."""
        async with self._lock:
            while self._writing is not None or self._pending:
                if self._writing is None:
                    self._writing, self._pending = (secrets.token_hex(8), self._pending), Counter()
                await self._send(*self._writing)
                self._writing = None

    async def _send(self, write_id: str, counts: Mapping[Field, int]) -> None:
        days = sorted({day for day, *_ in counts})
        names = [self._keys.usage_write(write_id), *(self._keys.usage + _date(day) for day in days)]
        args: list[int | bytes] = [USAGE_WRITE_S, MAX_DAYS * DAY_S]
        for (day, *name), amount in counts.items():
            args += [days.index(day) + 2, msgspec.json.encode(name), amount]
        await self._write(keys=names, args=args)

    async def days(self, num_days: int) -> dict[str, list[UsageRow]]:
        """Return the usage of the last `num_days` UTC days by date, today first, over all gateways.

        Counts that other gateways have not written yet are missing.
        """
        await self.flush()
        today = self._today()
        dates = [_date(today - n) for n in range(num_days)]
        pipeline = self._redis.pipeline(transaction=False)
        for day in dates:
            pipeline.hgetall(self._keys.usage + day)
        return {day: _rows(stored) for day, stored in zip(dates, await pipeline.execute(), strict=True)}

    def _today(self) -> int:
        return self._clock.wall_ms() // (1000 * DAY_S)


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()


def total(days: Mapping[str, list[UsageRow]]) -> list[UsageRow]:
    """Return the sums over all days."""
    sums: Counter[tuple[str | None, str, str]] = Counter()
    for rows in days.values():
        for row in rows:
            sums.update({(row.key, row.tier, name): getattr(row.use, name) for name in NAMES})
    return _by_key_and_tier(sums)


def _rows(stored: Mapping[bytes, bytes]) -> list[UsageRow]:
    names = msgspec.json.Decoder(tuple[str | None, str, str])
    return _by_key_and_tier({names.decode(field): int(amount) for field, amount in stored.items()})


def _by_key_and_tier(counts: Mapping[tuple[str | None, str, str], int]) -> list[UsageRow]:
    owners = sorted({(key or "", key, tier) for key, tier, _ in counts}, key=lambda owner: (owner[0], owner[2]))
    return [
        UsageRow(key, tier, Use(**{name: counts.get((key, tier, name), 0) for name in NAMES}))
        for _, key, tier in owners
    ]
