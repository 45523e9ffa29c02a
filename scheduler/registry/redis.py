"""The worker registry in Redis: a hash with a TTL per worker, a set of all worker ids as an index, a hash of all beats.

The server's clock decides which workers are alive, so the clocks of the machines need not agree. Workers of
earlier versions send no beats: theirs are taken from their statuses, at most 5 s after they have started.
"""

import zlib
from collections.abc import Iterable, Set
from contextlib import suppress

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.registry.worker_status import Beat, WorkerStart, WorkerStatus
from scheduler.store import keys
from scheduler.store.errors import UNREADABLE, StoreRefused

log = structlog.get_logger()

# Workers of earlier versions send no beats. They are looked for with each of so many reads of the beats, every 5 s, and
# when a beat is missing that was there: then a worker may have gone back to an earlier version.
INDEX_EVERY = 10


class _Deflated(msgspec.Struct):
    """A deflated JSON object, as a JSON object: gateways of earlier versions take the latter for a report."""

    deflated: bytes = b""


def deflated(json_text: str) -> bytes:
    """Return a report, which may have 200 decisions and is written each second, in about a fifth of its size."""
    return msgspec.json.encode(_Deflated(zlib.compress(json_text.encode(), level=1)))


def inflated(value: bytes) -> str:
    """Return a worker's report, which earlier versions do not deflate."""
    content = msgspec.json.decode(value, type=_Deflated).deflated
    return zlib.decompress(content).decode() if content else value.decode()


class RedisWorkerRegistry:
    """A worker registry in Redis. Implements `scheduler.registry.base.WorkerRegistry`."""

    def __init__(self, client: Redis, ttl_s: float = keys.WORKER_TTL_S) -> None:
        self._client = client
        self._keys = keys.Keys.of(client)
        self._ttl_ms = int(ttl_s * 1000)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(WorkerStatus)
        self._beat_decoder = msgspec.msgpack.Decoder(Beat)
        self._num_reads = 0  # of beats
        self._with_beat: Set[str] = set()  # ids at the last read
        self._without_beat: set[str] = set()  # ids of workers of earlier versions
        self._unreadable: set[str] = set()  # ids of workers whose status could not be read at the last read

    @property
    def num_unreadable(self) -> int:
        return len(self._unreadable)

    async def announce(self, status: WorkerStatus, sla_json: str = "{}") -> str:
        key, encode = self._keys.worker + status.worker_id, self._encoder.encode
        encoded = encode(status)
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hget(key, "incarnation")
        # Gateways of earlier versions forget a worker that has no `metrics`.
        pipeline.hset(key, mapping={"status": encoded, "metrics": "", "sla": deflated(sla_json)})
        pipeline.hset(key, "incarnation", status.incarnation)
        pipeline.pexpire(key, self._ttl_ms)
        pipeline.sadd(self._keys.workers, status.worker_id)
        pipeline.hset(self._keys.beats, status.worker_id, encode(status.beat))
        before, *_ = await pipeline.execute()
        return "" if before is None else before.decode()

    async def withdraw(self, worker_id: str) -> None:
        await self._remove(worker_id)

    async def remove_silent(self, worker_id: str) -> bool:
        was_there = await self._remove(worker_id)
        if was_there:
            await self._client.incr(self._keys.workers_lost)
        return was_there

    async def num_lost(self) -> int:
        return int(await self._client.get(self._keys.workers_lost) or 0)

    async def _remove(self, worker_id: str) -> bool:
        """Remove a worker. Return whether it was there, which one caller of several is told."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.delete(self._keys.worker + worker_id)
        pipeline.srem(self._keys.workers, worker_id)
        pipeline.hdel(self._keys.beats, worker_id)
        _, num_listed, num_beats = await pipeline.execute()
        return bool(num_listed or num_beats)

    async def announce_start(self, start: WorkerStart) -> None:
        ttl_ms = int(keys.START_TTL_S * 1000)
        pipeline = self._client.pipeline(transaction=True)
        pipeline.set(self._keys.start + start.worker_id, self._encoder.encode(start), px=ttl_ms)
        pipeline.sadd(self._keys.starting, start.worker_id)
        pipeline.pexpire(self._keys.starting, ttl_ms)
        await pipeline.execute()

    async def withdraw_start(self, worker_id: str) -> None:
        pipeline = self._client.pipeline(transaction=True)
        pipeline.delete(self._keys.start + worker_id)
        pipeline.srem(self._keys.starting, worker_id)
        await pipeline.execute()

    async def starting(self) -> list[WorkerStart]:
        members = await self._client.smembers(self._keys.starting)
        ids = sorted(m.decode() if isinstance(m, bytes) else m for m in members)
        values = await self._client.mget([self._keys.start + worker_id for worker_id in ids]) if ids else []
        starts = []
        for value in values:
            with suppress(*UNREADABLE):  # only for display
                if isinstance(value, bytes):
                    starts.append(msgspec.msgpack.decode(value, type=WorkerStart))
        return starts

    async def workers(self) -> list[WorkerStatus]:
        statuses, unreadable = [], set()
        for worker_id, status in (await self._fields("status")).items():
            try:
                statuses.append(self._decoder.decode(status))
            except UNREADABLE as error:
                unreadable.add(worker_id)
                if worker_id not in self._unreadable:
                    log.error("a worker's status cannot be read; it is skipped", worker=worker_id, reason=str(error))
        self._unreadable = unreadable
        return statuses

    async def beats(self) -> dict[str, Beat]:
        values: dict[bytes, bytes] = await self._client.hgetall(self._keys.beats)  # type: ignore[assignment]  # not decoded
        found = {worker_id.decode(): value for worker_id, value in values.items()}
        if self._num_reads % INDEX_EVERY == 0 or self._with_beat - found.keys():
            self._without_beat = await self._announced() - found.keys()
        self._num_reads, self._with_beat = self._num_reads + 1, set(found)
        found |= await self._fields("status", self._without_beat - found.keys())
        beats = {}
        for worker_id, value in sorted(found.items()):
            with suppress(*UNREADABLE):
                beats[worker_id] = self._beat_decoder.decode(value)
        return beats

    async def sla(self) -> dict[str, str]:
        return {worker_id: inflated(value) for worker_id, value in (await self._fields("sla")).items()}

    async def _announced(self) -> set[str]:
        members: set[bytes] = await self._client.smembers(self._keys.workers)  # type: ignore[assignment]  # not decoded
        return {member.decode() for member in members}

    async def _fields(self, name: str, worker_ids: Iterable[str] | None = None) -> dict[str, bytes]:
        """Return one field of every live worker, or of those of `worker_ids` that live, by worker id.

        Ids whose hash has expired are removed from the index. If such a worker is still alive, its next announcement
        adds its id again.
        """
        ids = sorted(await self._announced() if worker_ids is None else worker_ids)
        if not ids:
            return {}
        pipeline = self._client.pipeline(transaction=False)
        for worker_id in ids:
            pipeline.hget(self._keys.worker + worker_id, name)
        values = dict(zip(ids, await pipeline.execute(), strict=True))
        dead = [worker_id for worker_id, value in values.items() if value is None]
        if dead:
            with suppress(StoreRefused):  # a store that takes no writes is still read
                await self._client.srem(self._keys.workers, *dead)
                await self._client.hdel(self._keys.beats, *dead)
        return {worker_id: value for worker_id, value in values.items() if value is not None}
