"""The production queue in Redis or Valkey: a sorted set per tier, a sorted set of leases, and a hash per request.

Redis stores a request as an opaque payload with an id, a tier, a deadline and token counts. `scheduler.queue.leased`
has what this queue shares with the queue of tasks.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis

from engine.interface import SamplingParams
from scheduler.clock import Clock
from scheduler.queue.base import NOTHING_DUE, AheadLimit, Backlog, DueLimits, Preference, QueueFull, TooFarBehind
from scheduler.queue.leased import LeasedQueue, decode_known
from scheduler.queue.scripts import ClaimedRow, unpacked
from scheduler.request import VERSION, Checkpoint, Claimed, Lease, Request
from scheduler.store import keys
from scheduler.store.errors import UNREADABLE

log = structlog.get_logger()

NO_LIMIT = AheadLimit(math.inf, math.inf, 0.0, 0.0)


class _Arrival(msgspec.Struct):
    """The part of a `Request` that tells how long it has waited. The rest of a payload is skipped."""

    arrival_ms: int


class RedisQueue(LeasedQueue):
    """The queue in Redis. Implements `scheduler.queue.base.Queue`. Claims of this handle are leased to `worker_id`.

    If the reply to a command is lost, the command is sent again after the reconnect. A repeated `put` changes nothing.
    A repeated `claim` returns the same requests. A repeated `ack` reports False.
    """

    def __init__(self, client: Redis, clock: Clock, worker_id: str = "") -> None:
        super().__init__(client, clock, worker_id, keys.Keys.of(client))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._arrival_decoder = msgspec.msgpack.Decoder(_Arrival)

    async def put(
        self,
        requests: Sequence[Request],
        limit: int | None = None,
        ahead: AheadLimit | None = None,
        max_bytes: int | None = None,
        prefer: Preference | None = None,
    ) -> QueueFull | TooFarBehind | None:
        if not requests:
            return None
        tier = requests[0].tier
        if any(r.tier != tier for r in requests):
            raise ValueError("one put is for one tier")
        rows = [
            (r.id, r.score_ms, len(r.prompt_token_ids), r.sampling.max_tokens, self._encoder.encode(r))
            + (r.job_part, r.reply_to)
            for r in requests
        ]
        return await self._scripts.put(tier, limit, self._clock.wall_ms(), ahead or NO_LIMIT, max_bytes, rows, prefer)

    async def claim(
        self, limits: Mapping[str, int], lease_s: float, load: int | None = None, due: DueLimits = NOTHING_DUE
    ) -> list[Claimed]:
        self._start_listening()
        if load is None and not due and not any(limits.values()):
            return []
        return [await self._claimed(row) for row in await self._claim(limits, lease_s, load, due)]

    async def _claimed(self, row: ClaimedRow) -> Claimed:
        request_id, payload, fence, attempt, output, received, _ = row
        try:
            request = decode_known(self._decoder, payload or b"", VERSION)
        except UNREADABLE as error:
            log.error("a request cannot be read; it fails", request=request_id.decode(), reason=str(error))
            return Claimed(await self._outline(request_id.decode()), fence, attempt, unreadable=str(error))
        num_received = None if received == b"?" else int(received)
        return Claimed(request, fence, attempt, unpacked(output), num_received=num_received)

    async def _outline(self, request_id: str) -> Request:
        """Return what the store knows of a request whose payload cannot be read."""
        found: Any = await self._client.hmget(self._keys.request + request_id, ["tier", "reply_to", "deadline_ms"])
        tier, reply_to, deadline_ms = (value or b"" for value in found)
        now_ms = self._clock.wall_ms()
        nothing = SamplingParams(max_tokens=0)
        return Request(
            request_id, tier.decode(), (), nothing, now_ms, int(deadline_ms or now_ms), reply_to=reply_to.decode()
        )

    async def ack(self, leases: Sequence[Lease]) -> list[bool]:
        return await self._scripts.ack(leases) if leases else []

    async def checkpoint(self, checkpoints: Sequence[Checkpoint]) -> list[int]:
        return await self._scripts.checkpoint(checkpoints) if checkpoints else []

    async def resume(self, received: Sequence[Checkpoint]) -> list[bool]:
        return await self._scripts.resume(received) if received else []

    async def note_step(self, waits: Mapping[Lease, bool], alone: Lease | None) -> None:
        request_id = "" if alone is None else alone.request_id
        await self._scripts.note_step(self._worker_id, int(keys.ALONE_TTL_S * 1000), request_id, waits)

    async def cancel(self, request_ids: Sequence[str]) -> list[bool]:
        return await self._scripts.cancel(request_ids) if request_ids else []

    async def known(self, request_ids: Sequence[str]) -> list[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.exists(self._keys.request + request_id)
        return [count == 1 for count in await pipeline.execute()]

    async def depths(self, tiers: Sequence[str]) -> dict[str, int]:
        pipeline = self._client.pipeline(transaction=False)
        for tier in tiers:
            pipeline.zcard(self._keys.queue + tier)
        return dict(zip(tiers, await pipeline.execute(), strict=True))

    async def idle_workers(self, tiers: Sequence[str]) -> dict[str, int]:
        pipeline = self._client.pipeline(transaction=False)
        for tier in tiers:
            pipeline.zcount(self._keys.waiters + tier, 0, 0)
        return dict(zip(tiers, await pipeline.execute(), strict=True))

    async def backlogs(self, tiers: Sequence[str]) -> dict[str, Backlog]:
        pipeline = self._client.pipeline(transaction=True)
        for tier in tiers:
            pipeline.zcard(self._keys.queue + tier)
            pipeline.hmget(self._keys.waiting + tier, "prompt", "output")
        replies = iter(await pipeline.execute())
        return {tier: Backlog(next(replies), *(int(tokens or 0) for tokens in next(replies))) for tier in tiers}

    async def head_arrivals(self, tiers: Sequence[str]) -> dict[str, int]:
        pipeline = self._client.pipeline(transaction=False)
        for tier in tiers:
            pipeline.zrange(self._keys.queue + tier, 0, 0)
        heads = {tier: head[0] for tier, head in zip(tiers, await pipeline.execute(), strict=True) if head}
        for member in heads.values():
            pipeline.hget(self._keys.request + member.decode().split(":", 3)[3], "payload")
        payloads = dict(zip(heads, await pipeline.execute(), strict=True)) if heads else {}
        arrivals = {}
        for tier, payload in payloads.items():
            with contextlib.suppress(*UNREADABLE):  # also of one that was cancelled between the two round trips
                arrivals[tier] = self._arrival_decoder.decode(payload or b"").arrival_ms
        return arrivals

    async def probe(self) -> None:
        await self._client.set(self._keys.probe, b"", px=int(keys.PROBE_TTL_S * 1000))
