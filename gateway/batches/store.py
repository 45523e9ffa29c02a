"""Batches in Redis: records, results, ownership. Every change is one script, so several gateways may share it.

A batch is run by one gateway at a time: the holder of its owner key, a lock with a TTL. What an owner writes
carries its token; a stale one writes nothing. The client may send a script twice when an answer is lost, so
each of them changes nothing the second time. Decides nothing: which transition is due is the runner's matter,
which are legal is the table's (batch_record.py).
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.lock import Lock

from gateway.batches.model import Batch, BatchStatus, LineResult
from gateway.files.lua import load_script
from gateway.files.pagination import Page, index_of, page_of_ids, position_of, text
from scheduler.store.connection import durable

INDEX = "tidegate:batches"  # sorted set: id by position; one per owner
POSITION = "tidegate:batches:position"  # counter
UNFINISHED = "tidegate:batches:unfinished"  # set: ids with work left, if only clearing up
BY_STATUS = "tidegate:batches:by_status"  # hash: how many batches are in each state


class Moved(Enum):
    MOVED = "moved"
    NOT_OWNER = "not_owner"  # the lock has lapsed: another gateway runs this batch now
    ILLEGAL = "illegal"  # the batch is in a state from which this transition does not exist


class OwnershipLost(Exception):
    """The batch belongs to another gateway now: stop working on it."""


class BatchStore:
    """Owner of the keys `tidegate:batch*`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._create = load_script(redis, "gateway.batches", "create")
        self._move = load_script(redis, "gateway.batches", "move")
        self._record = load_script(redis, "gateway.batches", "record")
        self._forget_work = load_script(redis, "gateway.batches", "forget_work")

    async def create(self, batch: Batch) -> None:
        keys = [_key(batch.id), index_of(INDEX, batch.owner), POSITION, UNFINISHED, BY_STATUS]
        fields = {name: value for name, value in _as_dict(batch).items() if name != "status"}
        await self._create(keys=keys, args=[batch.id, batch.status.value, *_flat(fields)])

    async def get(self, batch_id: str) -> Batch | None:
        return (await self._load([batch_id]))[0]

    async def get_all(self, batch_ids: Sequence[str]) -> list[Batch]:
        """Those of them that there are."""
        return [batch for batch in await self._load(batch_ids) if batch is not None]

    async def page(self, *, owner: str | None, after: str | None, limit: int) -> Page[Batch] | None:
        """Of `owner`'s batches, newest first. None: the cursor `after` names none of them."""
        index = index_of(INDEX, owner)
        position = None
        if after is not None:
            position = await position_of(self._redis, index, after)
            if position is None:
                return None
        ids = await page_of_ids(self._redis, index, after=position, limit=limit, newest_first=True)
        return Page(await self.get_all(ids.items), ids.has_more)

    async def move(self, batch_id: str, target: BatchStatus, now_s: int, *, token: str = "", **changes: Any) -> Moved:
        """Enter `target` and set its `*_at`, with `changes` of other fields, if the table allows it from where
        the batch is. With a `token`, only as its owner."""
        sources = ",".join(source.value for source in target.sources)
        args = [token, sources, target.value, now_s, *_flat(changes)]
        answer = await self._move(keys=[_key(batch_id), _owner_key(batch_id), BY_STATUS], args=args)
        return Moved(text(answer))

    async def record(self, batch_id: str, results: Sequence[LineResult], token: str) -> int:
        """Store results and count them, each line once however often it comes; how many were new.
        Raises `OwnershipLost`."""
        args: list[str | bytes | int] = [token]
        for r in results:
            tokens = (r.input_tokens, r.cached_tokens, r.output_tokens, r.reasoning_tokens)
            args += [r.number, int(r.succeeded), *tokens, r.text]
        keys = [_key(batch_id), _results_key(batch_id), _owner_key(batch_id)]
        new = int(await self._record(keys=keys, args=args))
        if new < 0:
            raise OwnershipLost(batch_id)
        return new

    async def finished_lines(self, batch_id: str) -> set[int]:
        """The numbers of the lines that have a result."""
        return {int(number) for number in await self._redis.hkeys(_results_key(batch_id))}

    async def results(self, batch_id: str, numbers: Sequence[int]) -> "list[tuple[bool, bytes] | None]":
        """For each line (succeeded, text), or None where it has no result."""
        values = await self._redis.hmget(_results_key(batch_id), [str(n) for n in numbers])
        return [None if v is None else (v[:1] == b"1", v[1:]) for v in map(_bytes, values)]

    async def forget_work(self, batch_id: str, token: str) -> None:
        """The batch is over and its files are written: drop the results. Raises `OwnershipLost`."""
        keys = [_results_key(batch_id), UNFINISHED, _owner_key(batch_id)]
        if int(await self._forget_work(keys=keys, args=[token, batch_id])) < 0:
            raise OwnershipLost(batch_id)

    async def unfinished(self) -> list[str]:
        return sorted(text(member) for member in await self._redis.smembers(UNFINISHED))

    async def statuses(self, batch_ids: Sequence[str]) -> dict[str, BatchStatus]:
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipeline.hget(_key(batch_id), "status")
        found = await pipeline.execute()
        return {i: BatchStatus(text(s)) for i, s in zip(batch_ids, found, strict=True) if s is not None}

    async def counts_by_status(self) -> dict[BatchStatus, int]:
        counts = await self._redis.hgetall(BY_STATUS)
        known = {text(status): int(count) for status, count in counts.items()}
        return {status: known.get(status.value, 0) for status in BatchStatus}

    def owner_lock(self, batch_id: str, ttl_s: float) -> Lock:
        return self._redis.lock(_owner_key(batch_id), timeout=ttl_s, blocking=False, thread_local=False)

    async def durable(self) -> bool:
        """Everything written so far survives a loss of power."""
        return await durable(self._redis)

    async def _load(self, batch_ids: Sequence[str]) -> list[Batch | None]:
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipeline.hgetall(_key(batch_id))
        return [_decode(record) if record else None for record in await pipeline.execute()]


def _as_dict(batch: Batch) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(batch)
    return fields


def _flat(fields: Mapping[str, Any]) -> list[str | bytes]:
    """Field, value, field, value, …; each value as JSON, those that are None (absent) left out."""
    present = {name: value for name, value in fields.items() if value is not None}
    return [part for name, value in present.items() for part in (name, msgspec.json.encode(value))]


def _decode(record: Mapping[bytes, bytes]) -> Batch:
    fields = {text(name): value for name, value in record.items()}
    status = text(fields.pop("status"))
    decoded = {name: msgspec.json.decode(value) for name, value in fields.items()}
    return msgspec.convert({**decoded, "status": status}, type=Batch)


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _key(batch_id: str) -> str:
    return f"tidegate:batch:{batch_id}"


def _results_key(batch_id: str) -> str:
    return f"{INDEX}:results:{batch_id}"


def _owner_key(batch_id: str) -> str:
    return f"{INDEX}:owner:{batch_id}"
