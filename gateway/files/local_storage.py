"""A storage in a directory, which several gateways may share through a file system.

Contents are moved into place by a rename after they are on disk. Copies are hard links where the file system has them.
"""

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from gateway.files.storage import ContentLost, Entry

PRIVATE_DIR = 0o700  # mode of directories: other users of this machine must not read prompts and answers
READ_BYTES = 2**20


class LocalStorage:
    collect_s = 0.0

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def put(self, source: Path, name: str) -> None:
        await asyncio.to_thread(move_durably, source, self.directory / name)

    @property
    def place(self) -> str:
        return str(self.directory)

    async def get(self, name: str) -> bytes | None:
        try:
            return await asyncio.to_thread((self.directory / name).read_bytes)
        except FileNotFoundError:
            return None

    async def set(self, name: str, data: bytes) -> None:
        await asyncio.to_thread(_replace, self.directory / name, data)

    async def copy(self, source: str, name: str) -> None:
        await asyncio.to_thread(_link, self.directory / source, self.directory / name)

    async def append(self, name: str, position: int, data: bytes) -> None:
        try:
            await asyncio.to_thread(_write_at, self.directory / name, position, data)
        except FileNotFoundError:
            raise ContentLost(f"the folder of {name} is missing") from None

    async def fetch(self, name: str, sha256: str | None = None) -> Path:
        return await self.fetch_appended(name, 0)

    async def fetch_appended(self, name: str, size: int) -> Path:
        path = self.directory / name
        try:
            found = (await asyncio.to_thread(path.stat)).st_size
        except FileNotFoundError:
            raise ContentLost(f"{name} is missing") from None
        if found < size:
            raise ContentLost(f"{name} has {found} bytes instead of {size}")
        return path

    def path(self, name: str) -> Path:
        return self.directory / name

    async def read(self, name: str, start: int, end: int) -> AsyncIterator[bytes]:
        path = await self.fetch_appended(name, end)
        async with opened_in_thread(lambda: path.open("rb")) as file:
            await asyncio.to_thread(file.seek, start)
            for position in range(start, end, READ_BYTES):
                yield await asyncio.to_thread(file.read, min(READ_BYTES, end - position))

    async def remove(self, names: Sequence[str]) -> None:
        await asyncio.to_thread(unlink, [self.directory / name for name in names])

    async def remove_folder(self, name: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self.directory / name, ignore_errors=True)

    async def entries(self, folder: str) -> list[Entry]:
        return await asyncio.to_thread(local_entries, self.directory / folder)


class Closable(Protocol):
    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=Closable)


@asynccontextmanager
async def opened_in_thread(open_it: Callable[[], Opened]) -> AsyncIterator[Opened]:
    """Call `open_it` in a thread, and close what it returns at the end, also if the caller is cancelled meanwhile."""
    opening = asyncio.get_running_loop().run_in_executor(None, open_it)
    try:
        opened = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_result)
        raise
    with closing(opened):
        yield opened


def _close_result(opening: asyncio.Future[Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def local_entries(directory: Path) -> list[Entry]:
    """Return the entries of `directory`, none if it does not exist. The function blocks, so call it in a thread."""
    found = []
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            with suppress(FileNotFoundError):  # the entry was removed after it was listed
                found.append(Entry(path.name, path.stat().st_mtime))
    return found


def sha256_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal. The function blocks, so call it in a thread."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def move_durably(source: Path, target: Path) -> None:
    sync(source)
    os.replace(source, target)
    sync(target.parent)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    move_durably(new, path)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        target.parent.rmdir()
        raise ContentLost(f"{source.name} is missing") from None
    except FileExistsError:  # an earlier attempt to create the same content was ended by a crash
        pass
    except OSError:  # no hard links here
        shutil.copy(source, target)  # copies the file's mode too
        sync(target)
    sync(target.parent)


def _write_at(path: Path, position: int, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(handle, rest, position)
            rest, position = rest[written:], position + written
        os.fsync(handle)
    finally:
        os.close(handle)
    if position == len(data):  # the file is new
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or a directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
