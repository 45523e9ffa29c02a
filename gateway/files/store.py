"""The file store: contents are in a storage as `files/<id>`, records and their order are in Redis.

A file exists if its record exists. The content is complete and durable before the record is written. Knows bytes, names
and expiry; does not know HTTP (gateway/routes/jobs/files.py), what a file contains, or how a storage works
(gateway/files/storage.py). Several gateways may share a store if they share the storage. The owner of a file is the API
key that created it, identified by the key's name. Other keys do not see the file.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from gateway.files.disk import DiskReserve, noticing_full_disk
from gateway.files.local_storage import PRIVATE_DIR, LocalStorage, sha256_of
from gateway.files.marker import StorageTie
from gateway.files.pagination import Page, page_of_ids, text
from gateway.files.storage import FILES, INCOMING, Storage, StorageUnreachable
from gateway.store_keys import TOMBSTONE_S, GatewayKeys, index_of, tombstone
from scheduler.clock import Clock
from scheduler.store.durability import durable
from scheduler.store.errors import STORE_AWAY, StoreRefused
from scheduler.store.scripts import load_script

T = TypeVar("T")

log = logging.getLogger(__name__)

ARRIVAL_S = 3600.0  # seconds; an upload that has got nothing for longer was left by a crash
# Seconds for which content without a record is kept, after it was written and after the storage was tied to the store:
# somebody may notice meanwhile that the store is the wrong one, or has lost records.
ORPHAN_S = 7 * 86_400.0
MAX_ORPHANS = 1000  # contents without a record that one sweep removes at most; a crash leaves few
SWEEP_GROUP = 500  # files that a sweep handles per round trip to Redis


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The record of a file. Times are Unix seconds. A file without `expires_at` is kept until it is deleted.

    `owner` is the name of the API key that created the file (None: access was open). `sha256` is the checksum of the
    content, in hexadecimal.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    owner: str | None = None
    sha256: str | None = None

    def to_json(self) -> dict[str, Any]:
        fields = {"id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at}
        fields |= {"filename": self.filename, "purpose": self.purpose}
        fields |= {"status": "processed", "status_details": None}
        return fields if self.expires_at is None else fields | {"expires_at": self.expires_at}


class QuotaExceeded(Exception):
    """A file was not stored: its owner may have `quota_bytes` of files, and the other files have `used_bytes`."""

    def __init__(self, used_bytes: int, quota_bytes: int) -> None:
        super().__init__(used_bytes, quota_bytes)
        self.used_bytes = used_bytes
        self.quota_bytes = quota_bytes


class FileStore:
    """The store of uploads and of the output files of batches.

    It owns the storage's files and the Redis keys `tidegate:file*`. Uploads leave `reserve_bytes` free on the disk.
    The storage is `storage`, or the directory `data_dir`.
    """

    def __init__(
        self,
        redis: Redis,
        data_dir: Path,
        clock: Clock,
        reserve_bytes: int = 0,
        storage: Storage | None = None,
        *,
        batch_ttl_s: int | None = None,
        ttl_s: int | None = None,
    ) -> None:
        """Inputs of batches that set no expiry are kept for `batch_ttl_s` seconds, other files for `ttl_s`.

        None: until they are deleted.
        """
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._clock = clock
        self._batch_ttl_s = batch_ttl_s
        self._ttl_s = ttl_s
        self._register = load_script(redis, "gateway.files", "register")
        self._forget = load_script(redis, "gateway.files", "forget")
        self.storage = storage or LocalStorage(data_dir)
        self.tie = StorageTie(redis, self.storage, clock)
        self.data_dir = self.storage.directory
        self.arriving: Counter[str | None] = Counter()  # bytes of forms that are being received, by owner
        self.incoming = self.data_dir / INCOMING  # uploads in progress; a local storage takes them over by a rename
        for directory in (self.data_dir, self.data_dir / FILES, self.incoming):
            directory.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
        self.disk = DiskReserve(self.data_dir, reserve_bytes)

    async def add(
        self,
        content: Path,
        *,
        filename: str,
        purpose: str,
        owner: str | None,
        expires_after_s: int | None = None,
        file_id: str | None = None,
        quota_bytes: int | None = None,
    ) -> StoredFile:
        """Move the file at `content` into the store, and return its record, which is durable then.

        If the store already has a file with the id `file_id`, that file is replaced, and its position stays the same.
        If the file cannot be stored, nothing of it is left. Raises `QuotaExceeded` if the owner's files would have more
        than `quota_bytes` (None: no limit), and `DiskFull`.
        """
        now = self._now_s()
        if expires_after_s is None:
            expires_after_s = self._batch_ttl_s if purpose == "batch" else self._ttl_s
        expires_at = None if expires_after_s is None else now + expires_after_s
        file_id = file_id or f"file-{secrets.token_hex(12)}"
        sha256 = await asyncio.to_thread(sha256_of, content)
        record = StoredFile(file_id, content.stat().st_size, now, filename, purpose, expires_at, owner, sha256)
        with noticing_full_disk():
            await self.storage.put(content, content_name(file_id))
        try:
            await self._write_record(record, quota_bytes)
        except (StoreRefused, QuotaExceeded):
            await self._remove_contents([file_id])
            raise
        try:
            await durable(self._redis, self._keys.file(record.id))
        except STORE_AWAY:
            with contextlib.suppress(*STORE_AWAY):
                await self._remove([record])
            raise
        return record

    async def used_bytes(self, owner: str | None) -> int:
        """Return the bytes of all files of `owner`."""
        return int(await self._redis.hget(self._keys.files_bytes, owner or "") or 0)

    async def get(self, file_id: str, *, owner: str | None) -> StoredFile | None:
        """Return the record of a file; None if `owner` has no such file."""
        record = (await self._load([file_id]))[0]
        return record if record is not None and record.owner == owner else None

    async def delete(self, file_id: str, *, owner: str | None) -> bool:
        """Delete a file. Return False if `owner` has no such file. Downloads that have begun can finish."""
        record = await self.get(file_id, owner=owner)
        return record is not None and await self._remove([record]) == 1

    async def page(
        self,
        *,
        owner: str | None,
        purpose: str | None = None,
        after: str | None = None,
        limit: int,
        newest_first: bool = True,
    ) -> Page[StoredFile] | None:
        """Return a page of `owner`'s files; None if the cursor `after` is not the id of one of these files."""
        with contextlib.suppress(StoreRefused):  # expired files are left out in any case
            await self.sweep()
        own = index_of(self._keys.files, owner)
        index = own if purpose is None else self._keys.file_purpose(purpose, owner)
        ids = await page_of_ids(self._redis, index, own, after=after, limit=limit, newest_first=newest_first)
        if ids is None:
            return None
        records = await self._load(ids.items) if ids.items else []
        return Page([r for r in records if r is not None], ids.has_more)

    async def sweep(self) -> int:
        """Remove expired files. Return the number of removed files."""
        expired = await self._redis.zrange(self._keys.files_expiry, "-inf", str(self._now_s()), byscore=True)
        removed = 0
        for group in _groups([text(member) for member in expired]):
            texts = await self._redis.mget([self._keys.file(file_id) for file_id in group])
            if gone := [file_id for file_id, found in zip(group, texts, strict=True) if found is None]:
                await self._redis.zrem(self._keys.files_expiry, *gone)
            records = [msgspec.json.decode(found, type=StoredFile) for found in texts if found is not None]
            removed += await self._remove([record for record in records if self._is_expired(record)])
        return removed

    async def sweep_orphans(self, before_s: float) -> None:
        """Remove what a crash has left: content without a record that is older than `before_s`, and uploads.

        `before_s` is in Unix seconds. The caller has made sure that the storage belongs to the store.
        """
        arrivals = await self.storage.entries(INCOMING)
        stale_s = self._clock.wall_ms() / 1000 - ARRIVAL_S
        await self._remove_orphans(INCOMING, [e.name for e in arrivals if e.modified_s < stale_s])
        old = [entry.name for entry in await self.storage.entries(FILES) if entry.modified_s < before_s]
        orphans: list[str] = []
        for group in _groups(old):
            pipeline = self._redis.pipeline(transaction=False)
            for name in group:
                pipeline.exists(self._keys.file(name))
            known = await pipeline.execute()
            orphans += [name for name, exists in zip(group, known, strict=True) if not exists]
        await self._remove_orphans(FILES, orphans)

    async def _remove_orphans(self, folder: str, names: Sequence[str]) -> None:
        for group in _groups(names[:MAX_ORPHANS]):
            log.info("removing contents without a record from %s: %s", folder, " ".join(group))
            await self.storage.remove([f"{folder}/{name}" for name in group])

    async def _remove_contents(self, ids: Sequence[str]) -> None:
        """Remove the contents of files without a record. If the storage does not answer, they go with the orphans."""
        try:
            await self.storage.remove([content_name(file_id) for file_id in ids])
        except StorageUnreachable as error:
            log.warning("contents of deleted files stay for a week: %s", error)

    async def _write_record(self, record: StoredFile, quota_bytes: int | None) -> None:
        quota = "" if quota_bytes is None else quota_bytes
        expires_at = "" if record.expires_at is None else record.expires_at
        names = [self._keys.file(record.id), *self._indexes(record), self._keys.files_expiry]
        used_bytes = await self._register(
            keys=[*names, self._keys.files_position, self._keys.files_bytes],
            args=[msgspec.json.encode(record), record.id, expires_at, record.owner or "", record.bytes, quota],
        )
        if quota_bytes is not None and int(used_bytes) >= 0:
            raise QuotaExceeded(int(used_bytes), quota_bytes)

    async def _load(self, ids: Sequence[str]) -> list[StoredFile | None]:
        texts = await self._redis.mget([self._keys.file(file_id) for file_id in ids])
        records = [None if t is None else msgspec.json.decode(t, type=StoredFile) for t in texts]
        return [r if r is not None and not self._is_expired(r) else None for r in records]

    async def _remove(self, records: Sequence[StoredFile]) -> int:
        """Remove the files' records, then their content. Return the number of files that still existed."""
        if not records:
            return 0
        pipeline = self._redis.pipeline(transaction=False)
        for record in records:
            names = [self._keys.file(record.id), *self._indexes(record), self._keys.files_expiry]
            names += [tombstone(index_of(self._keys.files, record.owner), record.id), self._keys.files_bytes]
            await self._forget(keys=names, args=[record.id, TOMBSTONE_S, record.owner or ""], client=pipeline)
        forgotten = await pipeline.execute()
        await self._remove_contents([record.id for record in records])
        return sum(map(bool, forgotten))

    def _indexes(self, record: StoredFile) -> list[str]:
        """Return the keys of the two indexes that list a file.

        One index lists all files of the owner, the other the owner's files with the same purpose.
        """
        return [index_of(self._keys.files, record.owner), self._keys.file_purpose(record.purpose, record.owner)]

    def _is_expired(self, record: StoredFile) -> bool:
        return record.expires_at is not None and record.expires_at <= self._now_s()

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000


def content_name(file_id: str) -> str:
    """Return the name of a file's content in the storage."""
    return f"{FILES}/{file_id}"


def _groups(members: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(members), SWEEP_GROUP):
        yield members[start : start + SWEEP_GROUP]
