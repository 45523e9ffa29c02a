"""Batches in Redis: their records, which lines are done, and owners. The text of results is in the file storage.

Several gateways may share one store, so every change is one script. Only one gateway at a time runs a batch: the holder
of the batch's owner key, which is a lock with a TTL. The owner's writes contain the lock's token, and have no effect
after the lock is lost. redis-py may send a script twice if an answer is lost, so a repeated script changes nothing.
gateway/jobs/batches/model.py defines the legal transitions between states. gateway/jobs/batches/run.py decides which
transition is due.
"""

from collections.abc import Container, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.lock import Lock

from gateway.files.pagination import Page, page_of_ids, text
from gateway.jobs.batches.model import Batch, BatchStatus, LineResult
from gateway.jobs.batches.turns import UnfinishedBatch
from gateway.store_keys import TOMBSTONE_S, GatewayKeys, index_of, tombstone
from scheduler.store.durability import durable
from scheduler.store.scripts import load_script

TURN_FIELDS = ("status", "owner", "best_effort", "expires_at", "model")  # of a record
NO_KEY = -2  # answer of PTTL
SCAN_KEYS = 1000  # keys of the store that one search for batches without a time of their end looks at: about 1 ms


class Moved(Enum):
    MOVED = "moved"
    NOT_OWNER = "not_owner"  # the lock has expired; another gateway may run the batch
    ILLEGAL = "illegal"  # the table of transitions does not allow this move from the batch's state


class OwnershipLost(Exception):
    """This gateway does not own the batch any more, so it must stop its work on the batch."""


class FinishedLines(Container[int]):
    """A set of line numbers, as a bitmap of Redis."""

    def __init__(self, bits: bytes) -> None:
        self._bits = bits

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return number >> 3 < len(self._bits) and bool(self._bits[number >> 3] & 0x80 >> (number & 7))


class BatchStore:
    """The store of all batches. It owns the keys `tidegate:batch*` in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._create = load_script(redis, "gateway.jobs.batches", "create")
        self._move = load_script(redis, "gateway.jobs.batches", "move")
        self._record = load_script(redis, "gateway.jobs.batches", "record")
        self._remove = load_script(redis, "gateway.jobs.batches", "remove")
        self._forget_work = load_script(redis, "gateway.jobs.batches", "forget_work")

    async def create(self, batch: Batch, max_unfinished: int | None = None) -> bool:
        """Store a new batch. Return False if its owner has `max_unfinished` unfinished batches (None: no limit)."""
        names = [
            self._keys.batch(batch.id),
            index_of(self._keys.batches, batch.owner),
            self._keys.batches_position,
            self._keys.batches_unfinished,
            self._keys.batches_by_status,
            index_of(self._keys.batches_unfinished_of, batch.owner),
        ]
        fields = {name: value for name, value in _as_dict(batch).items() if name != "status"}
        limit = -1 if max_unfinished is None else max_unfinished
        return int(await self._create(keys=names, args=[limit, batch.id, batch.status.value, *_flat(fields)])) >= 0

    async def num_unfinished(self, owner: str | None) -> int:
        """Return how many batches of `owner` are not over, or not yet cleared up."""
        own = index_of(self._keys.batches_unfinished_of, owner)
        return len(await self._redis.sinter([own, self._keys.batches_unfinished]))

    async def remove(self, batch_id: str, owner: str | None, *, if_over: bool) -> bool:
        """Remove a batch. Return False if it is removed only `if_over`, and is not over, or not yet cleared up."""
        index = index_of(self._keys.batches, owner)
        names = [self._keys.batch(batch_id), index, self._keys.batches_unfinished, self._keys.batches_by_status]
        names += [self._keys.batch_done(batch_id), self._keys.batch_results(batch_id), self._keys.batches_ended]
        names.append(tombstone(index, batch_id))
        return int(await self._remove(keys=names, args=[batch_id, TOMBSTONE_S, int(if_over)])) == 1

    async def ended_before(self, time_s: int, limit: int) -> list[str]:
        """Return up to `limit` ids of the batches that were over and cleared up before `time_s` (Unix seconds)."""
        found = await self._redis.zrange(
            self._keys.batches_ended, "-inf", f"({time_s}", byscore=True, offset=0, num=limit
        )
        return [text(member) for member in found]

    async def date_undated_ends(self, cursor: int, now_s: int) -> int:
        """Set the end of batches to now that are over, but were cleared up by a version that did not note when.

        Looks at `SCAN_KEYS` keys of the store from `cursor` on. Return the next cursor, or 0 after the last key.
        """
        cursor, names = await self._redis.scan(cursor, self._keys.batch("*"), SCAN_KEYS)
        ids = [text(name).removeprefix(self._keys.batch("")) for name in names]
        unfinished = await self._redis.smismember(self._keys.batches_unfinished, ids) if ids else []
        if over := [batch_id for batch_id, is_unfinished in zip(ids, unfinished, strict=True) if not is_unfinished]:
            await self._redis.zadd(self._keys.batches_ended, dict.fromkeys(over, now_s), nx=True)
        return int(cursor)

    async def get(self, batch_id: str) -> Batch | None:
        return (await self._load([batch_id]))[0]

    async def get_all(self, batch_ids: Sequence[str]) -> list[Batch]:
        """Return the batches with the given ids, in the same order. Ids without a batch are left out."""
        return [batch for batch in await self._load(batch_ids) if batch is not None]

    async def page(self, *, owner: str | None, after: str | None, limit: int) -> Page[Batch] | None:
        """Return a page of `owner`'s batches, newest first; None if the cursor `after` is not one of these batches."""
        index = index_of(self._keys.batches, owner)
        ids = await page_of_ids(self._redis, index, index, after=after, limit=limit)
        return None if ids is None else Page(await self.get_all(ids.items), ids.has_more)

    async def move(self, batch_id: str, target: BatchStatus, now_s: int, *, token: str = "", **changes: Any) -> Moved:
        """Move a batch to the state `target` if the table of transitions allows this.

        The move also sets `<target>_at` to `now_s` (Unix seconds) and applies `changes`. If a `token` is given, the
        batch is moved only if this is the token of the batch's owner.
        """
        sources = ",".join(source.value for source in target.sources)
        args = [token, sources, target.value, now_s, *_flat(changes)]
        names = [self._keys.batch(batch_id), self._keys.batch_owner(batch_id), self._keys.batches_by_status]
        answer = await self._move(keys=names, args=args)
        return Moved(text(answer))

    async def record(
        self, batch_id: str, name: str, start: int, end: int, results: Sequence[LineResult], token: str
    ) -> None:
        """Count the lines of `results` as done. Their texts are the bytes from `start` to `end` of the content `name`.

        A repeated call changes nothing. Raises `OwnershipLost` if `token` is not the token of the batch's owner, or if
        the store has lost an earlier call.
        """
        counts = _counts(results)
        args: list[str | int] = [token, name, start, end, len(counts)]
        for field, increment in counts.items():
            args += [field, increment]
        args += [result.number for result in results]
        names = [self._keys.batch(batch_id), self._keys.batch_done(batch_id), self._keys.batch_results(batch_id)]
        names.append(self._keys.batch_owner(batch_id))
        if int(await self._record(keys=names, args=args)) < 0:
            raise OwnershipLost(batch_id)

    async def finished_lines(self, batch_id: str) -> "FinishedLines":
        """Return the numbers of the lines that have a result."""
        bits: Any = await self._redis.get(self._keys.batch_done(batch_id))
        return FinishedLines(bits or b"")

    async def results(self, batch_id: str) -> dict[str, int]:
        """Return the names of the contents that have results, and how many bytes of each are recorded."""
        found = await self._redis.hgetall(self._keys.batch_results(batch_id))
        return {text(name): int(size) for name, size in found.items()}

    async def forget_work(self, batch_id: str, token: str, now_s: int) -> bool:
        """Remove what is known of the results of a batch that is over and whose files are written.

        The batch then no longer counts as unfinished. Return False if the batch is not over: a store that has crashed
        may have lost its end. Raises `OwnershipLost` if `token` is not the token of the batch's owner.
        """
        names = [self._keys.batch_done(batch_id), self._keys.batch_results(batch_id), self._keys.batches_unfinished]
        names += [self._keys.batch_owner(batch_id), self._keys.batch(batch_id), self._keys.batches_ended]
        ends = ",".join(status.value for status in BatchStatus if status.is_terminal)
        match int(await self._forget_work(keys=names, args=[token, batch_id, ends, now_s])):
            case -1:
                raise OwnershipLost(batch_id)
            case -2:
                return False
        return True

    async def unfinished(self) -> list[str]:
        return sorted(text(member) for member in await self._redis.smembers(self._keys.batches_unfinished))

    async def read_unfinished(self, batch_ids: Sequence[str]) -> list[UnfinishedBatch]:
        """Return what decides the turns of batches. Ids without a batch are left out."""
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipeline.hmget(self._keys.batch(batch_id), TURN_FIELDS)
            pipeline.pttl(self._keys.batch_owner(batch_id))
        found = await pipeline.execute()
        entries = zip(batch_ids, found[::2], found[1::2], strict=True)
        return [_unfinished(i, record, lock_ms) for i, record, lock_ms in entries if record[0] is not None]

    async def statuses(self, batch_ids: Sequence[str]) -> dict[str, BatchStatus]:
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipeline.hget(self._keys.batch(batch_id), "status")
        found = await pipeline.execute()
        return {i: BatchStatus(text(s)) for i, s in zip(batch_ids, found, strict=True) if s is not None}

    async def counts_by_status(self) -> dict[BatchStatus, int]:
        counts = await self._redis.hgetall(self._keys.batches_by_status)
        known = {text(status): int(count) for status, count in counts.items()}
        return {status: known.get(status.value, 0) for status in BatchStatus}

    def owner_lock(self, batch_id: str, ttl_s: float) -> Lock:
        return self._redis.lock(self._keys.batch_owner(batch_id), timeout=ttl_s, blocking=False, thread_local=False)

    async def bound_lock(self, batch_id: str, lock: Lock) -> None:
        """Let the lock that another gateway holds live no longer than `lock` would.

        It lives longer if the store's clock was set back after it was renewed. If its holder has died, nobody would run
        the batch for as long.
        """
        assert lock.timeout is not None
        ttl_ms = int(lock.timeout * 1000)
        if await self._redis.pttl(self._keys.batch_owner(batch_id)) > ttl_ms:
            await self._redis.pexpire(self._keys.batch_owner(batch_id), ttl_ms)

    async def durable(self, batch_id: str | None = None) -> bool:
        """Wait until everything that was written so far is on disk, as `scheduler.store.durability.durable` does.

        Raises `NotDurable` also if the store has lost the record of the batch.
        """
        return await durable(self._redis, None if batch_id is None else self._keys.batch(batch_id))

    async def _load(self, batch_ids: Sequence[str]) -> list[Batch | None]:
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipeline.hgetall(self._keys.batch(batch_id))
        return [_decode(record) if record else None for record in await pipeline.execute()]


def _as_dict(batch: Batch) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(batch)
    return fields


def _flat(fields: Mapping[str, Any]) -> list[str | bytes]:
    """Return `fields` as a list: name, value, name, value, and so on. Values are JSON. None values are left out."""
    present = {name: value for name, value in fields.items() if value is not None}
    return [part for name, value in present.items() for part in (name, msgspec.json.encode(value))]


def _decode(record: Mapping[bytes, bytes]) -> Batch:
    fields = {text(name): value for name, value in record.items()}
    status = text(fields.pop("status"))
    decoded = {name: msgspec.json.decode(value) for name, value in fields.items()}
    return msgspec.convert({**decoded, "status": status}, type=Batch)


def _unfinished(batch_id: str, values: Sequence[bytes | None], lock_ms: int) -> UnfinishedBatch:
    """Return a batch from the values of `TURN_FIELDS` in its record."""
    status, *others = values
    owner, best_effort, expires_at, model = (msgspec.json.decode(value or b"null") for value in others)
    lock = None if lock_ms == NO_KEY else lock_ms
    return UnfinishedBatch(batch_id, BatchStatus(text(status)), owner, bool(best_effort), expires_at, model, lock)


def _counts(results: Sequence[LineResult]) -> dict[str, int]:
    """Return what `results` add to the counts in the record of their batch."""
    fields = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "engine_us")
    sums = {field: sum(getattr(result, field) for result in results) for field in fields}
    completed = sum(result.succeeded for result in results)
    sums |= {"completed": completed, "failed": len(results) - completed}
    return {field: total for field, total in sums.items() if total}
