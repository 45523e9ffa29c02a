"""The marker that ties a storage to its store: both hold the same id, and when they were last seen to agree.

A store that is empty, foreign or set back to an older state does not know the files in the storage. A sweep would take
them for leftovers of a crash. So a gateway compares the markers when it starts and before each sweep. Knows the storage
and the keys of records; does not know what files are.
"""

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from redis.asyncio import Redis
from redis.exceptions import LockError

from gateway.files.storage import BATCHES, FILES, Storage
from gateway.store_keys import GatewayKeys
from scheduler.clock import Clock
from scheduler.store.durability import durable

log = logging.getLogger(__name__)

LOCK_S = 30.0  # seconds after which the lock of a gateway that died is free
NAME = "tidegate.json"  # the storage's marker
MAX_LOST_S = 600.0  # seconds by which the store's marker may be older: a failover may have lost its last writes
MAX_PROBED = 1000  # contents of a folder that are looked up before the first tie


class ForeignStorage(Exception):
    """The storage belongs to another store, or to another state of this one. The message is for the operator."""

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(
            f"the storage {place} cannot be used. {fault} Nothing was changed. Start the gateway with the right "
            "--redis-url, and with the right --files-url or --data-dir: all gateways of a store share one storage. If "
            "both are right, `tidegate adopt` with the same flags ties the storage to the store. Seven days later, "
            "files that the store does not know are removed."
        )


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """What both sides hold. Times are Unix seconds.

    `tied_s` is when the storage was tied to the store, `seen_s` when a gateway has last found both markers equal.
    `is_new` marks a tie that is not complete: the storage may not have its marker yet.
    """

    id: str
    tied_s: int
    seen_s: int
    is_new: bool = False


class StorageTie:
    """The tie between one storage and one store."""

    def __init__(self, redis: Redis, storage: Storage, clock: Clock) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._storage = storage
        self._clock = clock

    async def check(self) -> Marker:
        """Return the marker of both, which are tied if neither has a marker yet. Raises `ForeignStorage`."""
        async with self._alone():
            in_store, in_storage = await self._read()
            if in_store is None and in_storage is None:
                await self._check_contents()
                return await self._tie()
            fault = _mismatch(in_store, in_storage)
            if in_store is None or fault is not None:
                raise ForeignStorage(self._storage.place, fault or "")
            return await self._complete(in_store)

    async def is_of_store(self) -> bool:
        """Return whether the storage has the store's marker, or the store has none. Changes nothing."""
        in_store, in_storage = await self._read()
        return in_store is None or in_store.is_new or (in_storage is not None and in_storage.id == in_store.id)

    async def has_lost_data(self) -> bool:
        """Return whether the store has no marker though the storage has one. Changes nothing."""
        in_store = await self._redis.exists(self._keys.storage)
        return not in_store and await self._storage.get(NAME) is not None

    async def adopt(self) -> Marker:
        """Tie the storage to the store, whatever either was tied to."""
        async with self._alone():
            return await self._tie()

    async def _read(self) -> tuple[Marker | None, Marker | None]:
        try:
            return _decoded(await self._redis.get(self._keys.storage)), _decoded(await self._storage.get(NAME))
        except msgspec.DecodeError:
            raise ForeignStorage(self._storage.place, "A marker cannot be read.") from None

    async def _check_contents(self) -> None:
        """Raise `ForeignStorage` if there are contents, and the store knows none of them.

        Storages of earlier versions have no marker.
        """
        found = False
        for folder, record_key in ((FILES, self._keys.file), (BATCHES, self._keys.batch)):
            names = [entry.name for entry in await self._storage.entries(folder)][:MAX_PROBED]
            if names and await self._redis.exists(*map(record_key, names)):
                return
            found = found or bool(names)
        if found:
            raise ForeignStorage(self._storage.place, "The storage has files, of which the store knows none.")

    async def _tie(self) -> Marker:
        now_s = self._now_s()
        marker = Marker(secrets.token_hex(16), now_s, now_s, is_new=True)
        await self._redis.set(self._keys.storage, msgspec.json.encode(marker))
        await durable(self._redis, self._keys.storage)
        log.info("the storage %s is tied to the store", self._storage.place)
        return await self._complete(marker)

    async def _complete(self, marker: Marker) -> Marker:
        """Note in both that their markers agree. The storage's marker is there before the store's is complete.

        Otherwise the store is first: its time must not be the older one.
        """
        seen = Marker(marker.id, marker.tied_s, max(marker.seen_s, self._now_s()))
        if marker.is_new:
            await self._storage.set(NAME, msgspec.json.encode(seen))
        await self._redis.set(self._keys.storage, msgspec.json.encode(seen))
        if not marker.is_new:
            await self._storage.set(NAME, msgspec.json.encode(seen))
        return seen

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold the lock. Raises `LockError` if it cannot be had."""
        lock = self._redis.lock(self._keys.storage_lock, timeout=LOCK_S, blocking_timeout=2 * LOCK_S)
        if not await lock.acquire():
            raise LockError("another gateway has been comparing the storage's marker for long")
        try:
            yield
        finally:
            with suppress(LockError):  # the lock has expired
                await lock.release()

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000


def _decoded(data: bytes | str | None) -> Marker | None:
    return None if data is None else msgspec.json.decode(data, type=Marker)


def _mismatch(in_store: Marker | None, in_storage: Marker | None) -> str | None:
    """Return what is wrong with two markers, of which at least one is there; None if they agree."""
    if in_store is None:
        return "The storage belongs to a store, and this one has no marker: it is another one, or has lost its data."
    if in_storage is None:
        other = "The store's files are in another storage, or this storage has lost its data."
        return None if in_store.is_new else other
    if in_store.id != in_storage.id:
        return "The storage belongs to another store."
    lost_s = in_storage.seen_s - in_store.seen_s
    if not in_store.is_new and lost_s > MAX_LOST_S:
        return f"The store has been set back: it is at least {lost_s / 3600:.1f} hours older than the storage."
    return None
