"""What finished lines show: how long prompts and answers of a model are, and how fast batches go.

Lines are counted where they run, and written to the store about once a second, so that every gateway knows what all
have seen. Lengths are sums over the lines of all batches of one model and endpoint. The pace is a moving average of one
batch, which the gateway that runs it writes. A lost write loses a second of knowledge and nothing else.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.jobs.batches.forecast.estimate import Lengths, Pace
from gateway.jobs.batches.input.size import line_size
from gateway.jobs.batches.model import Batch, LineResult
from gateway.store_keys import LENGTHS_TTL_S, PACE_TTL_S, GatewayKeys
from scheduler.clock import Clock
from scheduler.store.scripts import load_script

WRITE_S = 1.0  # seconds between two writes
DECAY = 255 / 256  # of the weight of older lines with each newer one: lengths are means of about 256 lines
# Time constant of the pace. Lines of bulk end in groups, many at a time, so a shorter one would jump.
PACE_S = 60.0


class PaceMeter(msgspec.Struct):
    """Decaying sums over the finished lines of one batch. Times are wall-clock seconds."""

    since_s: float
    at_s: float
    lines: float = 0.0
    tokens: float = 0.0
    lines_seen: int = 0

    def add(self, now_s: float, tokens: int) -> None:
        kept = self._kept(now_s)
        self.lines, self.tokens = self.lines * kept + 1, self.tokens * kept + tokens
        self.lines_seen += 1
        self.at_s = max(self.at_s, now_s)

    def pace(self, now_s: float) -> Pace:
        """Return the rates until now. While no line ends, they fall."""
        kept = self._kept(now_s)
        window_s = PACE_S * (1 - math.exp(-max(now_s - self.since_s, 1.0) / PACE_S))
        return Pace(self.lines * kept / window_s, self.tokens * kept / window_s, self.lines_seen)

    def _kept(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self.at_s) / PACE_S)


class LineStatistics:
    """The statistics of one gateway's lines, and those of all gateways in the store.

    Who runs the lines of a batch keeps its meter.
    """

    def __init__(self, redis: Redis, clock: Clock) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._clock = clock
        self._learn = load_script(redis, "gateway.jobs.batches", "lengths")
        self._unwritten: defaultdict[str, Counter[str]] = defaultdict(Counter)  # sums of lengths, by their key
        self._changed: dict[str, PaceMeter] = {}  # meters that are not written, by batch id
        self._written_s = -math.inf

    def meter(self) -> PaceMeter:
        """Return a new meter, for a batch whose lines begin to run."""
        return PaceMeter(self._now_s(), self._now_s())

    async def add(self, batch: Batch, meter: PaceMeter, body: Mapping[str, Any], result: LineResult) -> None:
        """Count a line that has its result. `body` is its request."""
        meter.add(self._now_s(), result.input_tokens + result.output_tokens)
        self._changed[batch.id] = meter
        if result.succeeded and batch.model is not None:
            size = await asyncio.to_thread(line_size, body)  # a prompt may be megabytes of text
            self._unwritten[self._keys.batch_lengths(batch.model, batch.endpoint)].update(
                lines=1,
                choices=size.choices,
                prompt_bytes=size.prompt_bytes,
                prompt_tokens=result.input_tokens,
                output_tokens=result.output_tokens,
            )
        if self._clock.now() - self._written_s >= WRITE_S:
            self._written_s = self._clock.now()
            await self._write()

    async def lengths(self, model: str | None, endpoint: str) -> Lengths:
        """Return what is known of the lines of a model and endpoint."""
        if model is None:
            return Lengths()
        names = [field.name for field in fields(Lengths)]
        found = await self._redis.hmget(self._keys.batch_lengths(model, endpoint), names)
        return Lengths(*(float(value or 0) for value in found))

    async def paces(self, batch_ids: Sequence[str]) -> dict[str, Pace]:
        """Return the pace of each batch that runs, by id."""
        names = [self._keys.batch_pace(batch_id) for batch_id in batch_ids]
        found = await self._redis.mget(names) if names else []
        meters = {
            batch_id: msgspec.msgpack.decode(value, type=PaceMeter)
            for batch_id, value in zip(batch_ids, found, strict=True)
            if isinstance(value, bytes)
        }
        return {batch_id: meter.pace(self._now_s()) for batch_id, meter in meters.items()}

    async def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, defaultdict(Counter)
        changed, self._changed = self._changed, {}
        try:
            for batch_id, meter in changed.items():
                await self._redis.set(self._keys.batch_pace(batch_id), msgspec.msgpack.encode(meter), ex=PACE_TTL_S)
            for key, sums in unwritten.items():
                factor = DECAY ** sums.pop("lines")
                pairs = [part for pair in sums.items() for part in pair]
                await self._learn(keys=[key], args=[factor, LENGTHS_TTL_S, *pairs])
        except RedisError:
            pass  # a line must not fail for this; the recorder of results logs that the store is away

    def _now_s(self) -> float:
        return self._clock.wall_ms() / 1000
