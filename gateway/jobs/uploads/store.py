"""Records of uploads in Redis: what was announced, which parts have come, and how the upload has ended.

Every change is one script, because several gateways share the records. A repeated script changes nothing. Knows no
bytes of parts: gateway/jobs/uploads/service.py has them on disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.files.pagination import text
from gateway.files.store import QuotaExceeded
from gateway.jobs.uploads.model import (
    CANCELLED,
    COMPLETED,
    EXPIRED,
    MAX_PARTS,
    MAX_PENDING,
    PENDING,
    NoSuchUpload,
    TooManyUploads,
    Upload,
)
from gateway.store_keys import UPLOAD_KEPT_S, GatewayKeys, index_of
from scheduler.store.durability import LOST, durable
from scheduler.store.errors import NotDurable
from scheduler.store.scripts import load_script

TOO_MANY = -2  # an answer of the script
FULL, UNKNOWN = "full", "unknown"


@dataclass(frozen=True, slots=True)
class UploadState:
    """What the store knows of an upload: `parts` has the bytes of each part by its id."""

    upload: Upload
    status: str
    parts: dict[str, int]


class UploadStore:
    """The store of all uploads. It owns the keys `tidegate:upload*` in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._create = load_script(redis, "gateway.jobs.uploads", "create")
        self._add_part = load_script(redis, "gateway.jobs.uploads", "add_part")
        self._finish = load_script(redis, "gateway.jobs.uploads", "finish")

    async def create(self, upload: Upload, *, used_bytes: int, quota_bytes: int | None) -> None:
        """Store a new upload, durably. `used_bytes` are those of the files of its owner.

        Raises `QuotaExceeded` if it would exceed the quota, and `TooManyUploads` if too many others are pending.
        """
        limit = "" if quota_bytes is None else max(0, quota_bytes - used_bytes)
        args: list[str | bytes | int] = [upload.id, msgspec.json.encode(upload), upload.bytes]
        args += [upload.expires_at, upload.created_at, UPLOAD_KEPT_S, limit, MAX_PENDING]
        reserved = int(await self._create(keys=self._keys_of(upload), args=args))
        if reserved == TOO_MANY:
            raise TooManyUploads
        if quota_bytes is not None and reserved >= 0:
            raise QuotaExceeded(used_bytes + reserved, quota_bytes)
        await durable(self._redis, self._keys.upload(upload.id))

    async def get(self, upload_id: str, now_s: int) -> UploadState:
        """Return the state of an upload. Raises `NoSuchUpload` if there is none."""
        fields = {
            text(name): value for name, value in (await self._redis.hgetall(self._keys.upload(upload_id))).items()
        }
        if not fields:
            raise NoSuchUpload
        upload = msgspec.json.decode(fields["upload"], type=Upload)
        status = _status(text(fields["status"]), upload.expires_at, now_s)
        parts = {name: int(value) for name, value in fields.items() if name.startswith("part_")}
        return UploadState(upload, status, parts)

    async def reserved_bytes(self, owner: str | None, now_s: int) -> int:
        """Return the bytes that the pending uploads of `owner` have announced."""
        index = index_of(self._keys.uploads_pending, owner)
        pending: list[Any] = await self._redis.zrange(index, f"({now_s}", "+inf", byscore=True)
        return sum(int(text(member).rpartition(":")[2]) for member in pending)

    async def add_part(self, upload: Upload, part_id: str, size: int) -> str:
        """Add a part, durably. Return `PENDING` if it is there now, else `FULL`, `UNKNOWN`, or the upload's status."""
        args: list[str | int] = [part_id, size, upload.max_received_bytes, MAX_PARTS]
        outcome = text(await self._add_part(keys=[self._keys.upload(upload.id)], args=args))
        if outcome == PENDING:
            await durable(self._redis, self._keys.upload(upload.id))
            if not await self._redis.hexists(self._keys.upload(upload.id), part_id):
                raise NotDurable(LOST)
        return outcome

    async def finish(self, upload: Upload, status: str) -> str:
        """End a pending upload, durably. Return the status that it has now."""
        outcome = text(await self._finish(keys=self._keys_of(upload), args=[status, f"{upload.id}:{upload.bytes}"]))
        await durable(self._redis)
        return outcome

    async def ended(self, upload_ids: Sequence[str], now_s: int) -> list[str]:
        """Return those of the ids whose upload takes no parts any more, or does not exist."""
        pipeline = self._redis.pipeline(transaction=False)
        for upload_id in upload_ids:
            pipeline.hmget(self._keys.upload(upload_id), "status", "upload")
        over = []
        for upload_id, (status, record) in zip(upload_ids, await pipeline.execute(), strict=True):
            known = None if record is None else msgspec.json.decode(record, type=Upload)
            if known is None or _status(text(status), known.expires_at, now_s) in (COMPLETED, CANCELLED, EXPIRED):
                over.append(upload_id)
        return over

    def _keys_of(self, upload: Upload) -> list[str]:
        return [self._keys.upload(upload.id), index_of(self._keys.uploads_pending, upload.owner)]


def _status(stored: str, expires_at: int, now_s: int) -> str:
    return EXPIRED if stored == PENDING and now_s >= expires_at else stored
