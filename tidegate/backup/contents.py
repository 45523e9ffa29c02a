"""Contents of the storage, copied into the folder of a backup and back. A folder has them under their own names."""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gateway.files.local_storage import PRIVATE_DIR, sha256_of, sync
from gateway.files.storage import ContentLost, Storage
from tidegate.backup.snapshot import Content

PIECE_BYTES = 8 * 2**20  # bytes that are appended at once


async def save(storage: Storage, contents: Sequence[Content], folder: Path) -> list[str]:
    """Copy contents into `folder`, unless it has them. Return the names of those that are missing or damaged."""
    missing = []
    for content in contents:
        try:
            await _save(storage, content, folder / content.name)
        except ContentLost:
            missing.append(content.name)
    return missing


async def _save(storage: Storage, content: Content, target: Path) -> None:
    if await asyncio.to_thread(is_whole, content, target):
        return
    if content.is_appended:
        source = await storage.fetch_appended(content.name, content.bytes or 0)
    else:
        source = await storage.fetch(content.name, content.sha256)
    if source != target:  # an object store's local copy is already where it is wanted
        await asyncio.to_thread(_copy, source, target, content.name)
    if not await asyncio.to_thread(is_whole, content, target):
        raise ContentLost(f"{content.name} is damaged")


def is_whole(content: Content, path: Path) -> bool:
    """Return whether `path` has the content, as far as the store says what it is. What was appended may be longer."""
    if not path.exists():
        return False
    size = path.stat().st_size
    if content.bytes is not None and (size < content.bytes if content.is_appended else size != content.bytes):
        return False
    return content.sha256 is None or sha256_of(path) == content.sha256


def _copy(source: Path, target: Path, name: str) -> None:
    target.parent.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        raise ContentLost(f"{name} is missing") from None
    sync(target)


async def put_back(storage: Storage, contents: Sequence[Content], folder: Path) -> None:
    """Copy those contents that `folder` has into the storage, whatever it has under their names."""
    with tempfile.TemporaryDirectory(prefix="restore-", dir=storage.directory) as scratch:
        for content in contents:
            if (folder / content.name).exists():
                await _put(storage, content, folder / content.name, Path(scratch) / "content")


async def _put(storage: Storage, content: Content, source: Path, scratch: Path) -> None:
    (storage.directory / content.name).parent.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
    if not content.is_appended:
        await asyncio.to_thread(shutil.copyfile, source, scratch)
        await storage.put(scratch, content.name)
        return
    with source.open("rb") as file:
        for position in range(0, content.bytes or 0, PIECE_BYTES):
            size = min(PIECE_BYTES, (content.bytes or 0) - position)
            await storage.append(content.name, position, await asyncio.to_thread(file.read, size))
