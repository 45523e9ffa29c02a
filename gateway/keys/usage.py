"""What each API key has used: requests, tokens and cost by tier, in /metrics and for each day in Redis.

Knows names of keys, projects and tiers, and numbers; does not know requests. All gateways add to the same days. What a
key has used is in the store before its answer ends, so that a gateway that is killed loses nothing of what it has
answered: the answers that end meanwhile share one write. The same write corrects what budgets were charged in advance.
Open access, for which nobody is charged, is written every few seconds.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.http.metrics import GatewayMetrics
from gateway.keys.limits import Charge
from gateway.store_keys import DAY_S, USAGE_DAYS, USAGE_WRITE_S, GatewayKeys, spender, utc_day
from scheduler.clock import Clock
from scheduler.store.scripts import load_script

log = structlog.get_logger(__name__)

FLUSH_S = 2.0  # seconds between two writes of what the store did not take at once
NO_KEY = "-"  # label of requests without a key, with open access


@dataclass(frozen=True, slots=True)
class Use:
    """What one request, or many of them, have used.

    `cached_prompt_tokens` are those of the prompt tokens that came from the prefix cache or with a cached answer.
    Answers from the cache also count in `cached_answers`, and their output in `cached_completion_tokens`. `cost_nano`
    is in billionths of the currency's unit.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_answers: int = 0
    cached_completion_tokens: int = 0
    cost_nano: int = 0


NAMES = tuple(field.name for field in fields(Use))

# The label `kind` of each count of tokens in the metrics; empty for the other counts.
KINDS = {name: name.removesuffix("_tokens") if name.endswith("_tokens") else "" for name in NAMES}

Field = tuple[str, bytes]  # a hash in the store, and a field of it


@dataclass(frozen=True, slots=True)
class UsageRow:
    key: str | None  # None: open access, or all keys of the project
    tier: str
    use: Use
    project: str | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose usage is counted: a key (None: open access) and its project, if any."""

    key: str | None = None
    project: str | None = None

    @property
    def spenders(self) -> list[str]:
        named = ((self.key, False), (self.project, True))
        return [spender(name, is_project) for name, is_project in named if name is not None]


class UsageMeter:
    """The counts of one gateway, and access to the sums over all gateways."""

    def __init__(self, redis: Redis, metrics: GatewayMetrics, clock: Clock) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._metrics = metrics
        self._clock = clock
        self._write = load_script(redis, "gateway.keys", "usage")
        self._pending: Counter[Field] = Counter()
        # The number and counts of a write that may or may not have been done. The store knows the last number.
        self._writing: tuple[int, Mapping[Field, int]] | None = None
        self._marker = self._keys.usage_write(secrets.token_hex(8))
        self._num_writes = 0  # begun until now; the next one has what is pending
        self._lock = asyncio.Lock()  # one write at a time
        self._num_failures = 0  # of writes

    def record(self, owner: Owner, tier: str, use: Use, charge: Charge | None = None, charged_tokens: int = 0) -> None:
        """Count what a request of a key has used in a tier.

        `charged_tokens` and the cost are what its budgets lose. `charge` is what they were charged in advance, if
        anything: of that, the rest is given back.
        """
        now_ms = self._clock.wall_ms()
        self._show(owner.key or NO_KEY, tier, use)
        of_day, beside = self._keys.usage_of(utc_day(now_ms)), () if owner.project is None else (owner.project,)
        for count in NAMES:
            if amount := getattr(use, count):
                self._pending[of_day, msgspec.json.encode((owner.key, tier, count, *beside))] += amount
        if not (spenders := owner.spenders):
            return
        tokens, cost = charged_tokens, use.cost_nano
        if charge is not None:
            now_ms, tokens, cost = charge.at_ms, tokens - charge.tokens, cost - charge.cost_nano
        for spent in self._keys.spent_in(utc_day(now_ms)):
            for one in spenders:
                self._add(spent, f"{one}:tokens".encode(), tokens)
                self._add(spent, f"{one}:cost".encode(), cost)

    def _show(self, label: str, tier: str, use: Use) -> None:
        self._metrics.usage_requests.labels(label, tier).inc(use.requests)
        for name, kind in KINDS.items():
            if kind and (amount := getattr(use, name)):
                self._metrics.usage_tokens.labels(label, tier, kind).inc(amount)

    def _add(self, name: str, field: bytes, amount: int) -> None:
        if amount:
            self._pending[name, field] += amount

    async def follow(self) -> None:
        """Write the counts to the store every `FLUSH_S` seconds, for ever."""
        while True:
            await self._clock.sleep(FLUSH_S)
            await self.try_flush()

    async def try_flush(self) -> None:
        """Write the counts as `flush` does. If the store does not answer, keep them for the next time.

        Whoever has waited for a write that failed does not try again, or each of them would wait as long.
        """
        number, failures = self._num_writes, self._num_failures
        async with self._lock:
            if self._num_failures > failures:
                return
            try:
                await self._write_pending(number)
            except RedisError as error:
                self._num_failures += 1
                log.warning("usage is not written yet", error=str(error))

    async def flush(self) -> None:
        """Write all counts to the store. An earlier write without a reply is repeated first, with its own number.

        Whoever waits for a write under way shares the next one with all others who wait.
        """
        number = self._num_writes
        async with self._lock:
            await self._write_pending(number)

    async def _write_pending(self, number: int) -> None:
        """Write what was counted before write `number` began, if that has not been done yet."""
        await self._write_again()
        if self._pending and number == self._num_writes:
            self._num_writes += 1
            self._writing, self._pending = (self._num_writes, self._pending), Counter()
            await self._write_again()

    async def _write_again(self) -> None:
        if self._writing is not None:
            await self._send(*self._writing)
            self._writing = None

    async def _send(self, number: int, counts: Mapping[Field, int]) -> None:
        hashes = sorted({name for name, _ in counts})
        args: list[int | bytes] = [USAGE_WRITE_S, USAGE_DAYS * DAY_S, number]
        for (name, field), amount in counts.items():
            args += [hashes.index(name) + 2, field, amount]
        await self._write(keys=[self._marker, *hashes], args=args)

    async def days(self, num_days: int) -> dict[str, list[UsageRow]]:
        """Return the usage of the last `num_days` UTC days by date, today first, over all gateways."""
        await self.flush()
        today = utc_day(self._clock.wall_ms())
        days = [today - timedelta(days=n) for n in range(num_days)]
        pipeline = self._redis.pipeline(transaction=False)
        for day in days:
            pipeline.hgetall(self._keys.usage_of(day))
        return {day.isoformat(): _rows(stored) for day, stored in zip(days, await pipeline.execute(), strict=True)}

    async def spent(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return what is spent today and this month: tokens as `key:web:tokens`, costs in nano as `key:web:cost`."""
        await self.flush()
        names = self._keys.spent_in(utc_day(self._clock.wall_ms()))
        found: list[Any] = [await self._redis.hgetall(name) for name in names]
        today, month = ({field.decode(): int(amount) for field, amount in one.items()} for one in found)
        return today, month


def total(days: Mapping[str, list[UsageRow]]) -> list[UsageRow]:
    """Return the sums over all days."""
    return summed(row for rows in days.values() for row in rows)


def by_project(rows: Iterable[UsageRow]) -> list[UsageRow]:
    """Return the sums over the keys of each project, and over those of none."""
    return summed(replace(row, key=None) for row in rows)


def summed(rows: Iterable[UsageRow]) -> list[UsageRow]:
    """Return the sums of the rows that are of the same key, project and tier."""
    sums: Counter[tuple[str | None, str, str | None, str]] = Counter()
    for row in rows:
        sums.update({(row.key, row.tier, row.project, name): getattr(row.use, name) for name in NAMES})
    return _by_key_and_tier(sums)


def _rows(stored: Mapping[bytes, bytes]) -> list[UsageRow]:
    names = msgspec.json.Decoder(list[str | None])
    counts: dict[tuple[str | None, str, str | None, str], int] = {}
    for field, amount in stored.items():
        key, tier, name, *project = names.decode(field)
        counts[key, tier or "", project[0] if project else None, name or ""] = int(amount)
    return _by_key_and_tier(counts)


def _by_key_and_tier(counts: Mapping[tuple[str | None, str, str | None, str], int]) -> list[UsageRow]:
    owners = sorted({names[:3] for names in counts}, key=lambda names: [name or "" for name in names])
    return [
        UsageRow(key, tier, Use(**{name: counts.get((key, tier, project, name), 0) for name in NAMES}), project)
        for key, tier, project in owners
    ]
