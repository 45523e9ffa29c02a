"""Uploads in parts: parts are kept on disk as `<data_dir>/uploads/<upload>/<part>` until they become one file.

A part exists if its record exists, and its bytes are on disk before that. Any gateway that shares the store and the
data directory can take any call. After a crash, a completion can be repeated: its file has the same id. Does not know
HTTP.
"""

import asyncio
import hashlib
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio import Redis

from gateway.fairness import Turns
from gateway.files.disk import noticing_full_disk
from gateway.files.local_storage import PRIVATE_DIR, move_durably, sync
from gateway.files.store import FileStore, StoredFile
from gateway.jobs.uploads.model import (
    CANCELLED,
    COMPLETED,
    LIFETIME_S,
    MAX_PARTS,
    PENDING,
    NoSuchUpload,
    Part,
    Upload,
    UploadRefused,
)
from gateway.jobs.uploads.store import FULL, UNKNOWN, UploadState, UploadStore
from scheduler.clock import Clock
from scheduler.store.errors import STORE_AWAY

log = structlog.get_logger(__name__)

SWEEP_S = 60.0  # seconds between two looks for parts of uploads that have ended
MAX_COMPLETIONS = 4  # at once, of all owners
COPY_BYTES = 2**20  # bytes that are copied at once while parts become one file


class UploadService:
    """The uploads of one gateway. The finished file goes to `files`."""

    def __init__(self, redis: Redis, files: FileStore, clock: Clock) -> None:
        self._store = UploadStore(redis)
        self._files = files
        self._clock = clock
        self._directory = files.data_dir / "uploads"
        self._directory.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
        # Files are put together one at a time for each owner and a few in all, because other work needs threads too.
        self._completions = Turns(MAX_COMPLETIONS)

    async def create(self, new_id: str, quota_bytes: int | None, *, bytes: int, **fields: Any) -> Upload:
        """Create an upload of so many bytes with these fields; `new_id` is its id without the prefix.

        Raises `QuotaExceeded` if the files and the pending uploads of its owner would have more than `quota_bytes`,
        `TooManyUploads` if too many of them are pending, and `DiskFull` if the disk has no room for it.
        """
        self._files.disk.check(bytes)
        if quota_bytes is not None:
            await self._files.sweep()
        now = self._now_s()
        upload = Upload(f"upload_{new_id}", bytes, created_at=now, expires_at=now + LIFETIME_S, **fields)
        await self._store.create(upload, used_bytes=await self._files.used_bytes(upload.owner), quota_bytes=quota_bytes)
        return upload

    async def reserved_bytes(self, owner: str | None) -> int:
        """Return the bytes that the pending uploads of `owner` have announced."""
        return await self._store.reserved_bytes(owner, self._now_s())

    async def pending(self, upload_id: str, *, owner: str | None) -> UploadState:
        """Return the state of an upload that takes parts. Raises `NoSuchUpload`, or `UploadRefused` if it has ended."""
        state = await self._state(upload_id, owner)
        _check_pending(state.status)
        return state

    async def add_part(self, upload: Upload, content: Path) -> Part:
        """Move the file at `content` to the parts of `upload`. The part is durable when this returns.

        Raises `UploadRefused` if the upload takes no more parts.
        """
        part = Part(f"part_{secrets.token_hex(12)}", upload.id, self._now_s())
        path = self._path(upload.id, part.id)
        with noticing_full_disk():
            size = await asyncio.to_thread(_keep, content, path)
        try:
            outcome = await self._store.add_part(upload, part.id, size)
            _check_pending(outcome)
        except BaseException:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise
        return part

    async def complete(
        self,
        upload_id: str,
        part_ids: Sequence[str],
        md5: str | None,
        *,
        owner: str | None,
        quota_bytes: int | None,
    ) -> tuple[Upload, StoredFile | None]:
        """Make one file of the parts in the order of `part_ids`, and return the upload and its file.

        A repeated call returns the same; the file is None if it was deleted since. `md5` is the digest that the file
        must have, in hex digits (None: any). Raises `NoSuchUpload`, `UploadRefused`, `QuotaExceeded` and `DiskFull`.
        """
        async with self._completions.of(owner):
            state = await self._state(upload_id, owner)
            upload = state.upload
            if state.status != COMPLETED:
                _check_pending(state.status)
                _check_parts(state, part_ids)
                await self._put_together(upload, part_ids, md5, quota_bytes)
        return upload, await self._files.get(upload.file_id, owner=owner)

    async def cancel(self, upload_id: str, *, owner: str | None) -> Upload:
        """Cancel an upload and remove its parts. A repeated call changes nothing.

        Raises `NoSuchUpload`, or `UploadRefused` if the upload has ended in another way.
        """
        state = await self._state(upload_id, owner)
        if state.status != CANCELLED:
            _check_pending(state.status)
            outcome = await self._store.finish(state.upload, CANCELLED)
            if outcome != CANCELLED:
                _check_pending(outcome)
            await self._remove_parts(upload_id)
        return state.upload

    async def follow(self) -> None:
        """Remove the parts of uploads that have ended, every `SWEEP_S` seconds, for ever."""
        while True:
            try:
                await self.sweep()
            except (*STORE_AWAY, OSError) as error:
                log.warning("parts of uploads were not removed", error=str(error))
            await self._clock.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Remove the parts of uploads that were completed, cancelled or given up."""
        names = await asyncio.to_thread(os.listdir, self._directory)
        for upload_id in await self._store.ended(names, self._now_s()) if names else ():
            await self._remove_parts(upload_id)

    async def _put_together(
        self, upload: Upload, part_ids: Sequence[str], md5: str | None, quota_bytes: int | None
    ) -> None:
        self._files.disk.check(upload.bytes)
        paths = [self._path(upload.id, part_id) for part_id in part_ids]
        content = self._files.incoming / f"{upload.id}-{secrets.token_hex(4)}"
        try:
            with noticing_full_disk():
                digest = await asyncio.to_thread(_concatenate, paths, content)
            if md5 is not None and digest != md5.lower():
                raise UploadRefused(f"The MD5 digest of the parts is {digest}, not the given one.", "md5")
            await self._files.add(
                content,
                filename=upload.filename,
                purpose=upload.purpose,
                owner=upload.owner,
                expires_after_s=upload.file_expires_after_s,
                file_id=upload.file_id,
                quota_bytes=quota_bytes,
            )
        finally:
            content.unlink(missing_ok=True)
        outcome = await self._store.finish(upload, COMPLETED)
        if outcome != COMPLETED:  # it was cancelled meanwhile, through another gateway
            await self._files.delete(upload.file_id, owner=upload.owner)
            _check_pending(outcome)
        await self._remove_parts(upload.id)

    async def _state(self, upload_id: str, owner: str | None) -> UploadState:
        state = await self._store.get(upload_id, self._now_s())
        if state.upload.owner != owner:
            raise NoSuchUpload
        return state

    async def _remove_parts(self, upload_id: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._directory / upload_id, ignore_errors=True)

    def _path(self, upload_id: str, part_id: str) -> Path:
        return self._directory / upload_id / part_id

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000


def _check_pending(status: str) -> None:
    """Raise the error of an upload that takes no part and no completion because of its `status`."""
    if status == UNKNOWN:
        raise NoSuchUpload
    if status == FULL:
        raise UploadRefused(
            "The parts of this upload have far more bytes than it announced, or there are more than "
            f"{MAX_PARTS}. Cancel it and begin another one."
        )
    if status != PENDING:
        raise UploadRefused(f"This upload is {status}: create another one.")


def _check_parts(state: UploadState, part_ids: Sequence[str]) -> None:
    if unknown := [part_id for part_id in part_ids if part_id not in state.parts]:
        raise UploadRefused(f"This upload has no part {unknown[0][:200]!r}.", "part_ids")
    if len(set(part_ids)) < len(part_ids):
        raise UploadRefused("A part is named twice.", "part_ids")
    total = sum(state.parts[part_id] for part_id in part_ids)
    if total != state.upload.bytes:
        message = f"The parts have {total} bytes, but the upload was announced with {state.upload.bytes}."
        raise UploadRefused(message, "part_ids")


def _keep(content: Path, target: Path) -> int:
    """Move the part at `content` to `target`, durably. Return its bytes."""
    target.parent.mkdir(PRIVATE_DIR, exist_ok=True)
    size = content.stat().st_size
    move_durably(content, target)
    sync(target.parent.parent)  # the folder of the upload may be new
    return size


def _concatenate(parts: Sequence[Path], target: Path) -> str:
    """Write the parts one after another to `target`. Return the MD5 digest of the whole.

    Raises `UploadRefused` if a part is not on this disk.
    """
    digest = hashlib.md5(usedforsecurity=False)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
        for path in parts:
            try:
                with path.open("rb") as part:
                    while piece := part.read(COPY_BYTES):
                        digest.update(piece)
                        output.write(piece)
            except FileNotFoundError:
                raise UploadRefused(
                    f"The part {path.name} is not on this gateway's disk: gateways that share a store need the same "
                    "data directory. Cancel the upload and begin another one.",
                    "part_ids",
                ) from None
    return digest.hexdigest()
