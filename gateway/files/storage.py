"""Storages: where the contents of files, batch inputs and results lie. What each of them can do, and their errors.

A content has a name such as `files/file-1` or `batches/batch_1/input.jsonl`. `local_storage.py` keeps contents in a
directory, `object_storage.py` in an object store such as S3. Knows names and bytes; does not know records or Redis.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from redis.exceptions import ConnectionError

FILES, BATCHES, INCOMING = "files", "batches", "incoming"  # the folders of a storage


class StorageUnreachable(ConnectionError):
    """The storage does not answer, or refuses. A later attempt may succeed.

    It is a `ConnectionError`, as `StoreRefused` is, because whoever can wait for the store can also wait for the
    storage.
    """


class ContentLost(Exception):
    """The storage does not have a content, or has only a part of it."""


class ContentDamaged(ContentLost):
    """A content does not match its SHA-256 checksum."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A content or a folder. `modified_s` (Unix seconds) is when something of it was last written."""

    name: str
    modified_s: float


class Storage(Protocol):
    """A storage of contents.

    `directory` is a directory of this machine, in which uploads are received and batches work. The local copy of a
    content is at `directory / name`.
    """

    @property
    def directory(self) -> Path: ...

    @property
    def collect_s(self) -> float:
        """Seconds for which results are collected before they are appended, because each append is costly."""
        ...

    async def put(self, source: Path, name: str) -> None:
        """Move the local file `source` into the storage. The content is durable when this returns."""
        ...

    @property
    def place(self) -> str:
        """Where the contents lie, for messages to the operator."""
        ...

    async def get(self, name: str) -> bytes | None:
        """Return a small content; None if there is none."""
        ...

    async def set(self, name: str, data: bytes) -> None:
        """Write or replace a small content. It is durable when this returns."""
        ...

    async def copy(self, source: str, name: str) -> None:
        """Make `name` a content that is equal to `source` and stays if `source` is removed. Raises `ContentLost`."""
        ...

    async def append(self, name: str, position: int, data: bytes) -> None:
        """Add `data` to the content `name`, which has `position` bytes so far. It is durable when this returns.

        An append may be repeated with the same data. Appended contents are read with `fetch_appended` only. Raises
        `ContentLost` if a directory is gone: its batch was removed.
        """
        ...

    async def fetch(self, name: str, sha256: str | None = None) -> Path:
        """Return the path of a local copy, which is made and checked if needed. Raises `ContentLost`."""
        ...

    async def fetch_appended(self, name: str, size: int) -> Path:
        """Return the path of a local file that begins with the `size` bytes that were appended to `name`.

        Raises `ContentLost` if the storage has fewer bytes.
        """
        ...

    def path(self, name: str) -> Path | None:
        """Return the path from which the content can be sent; None if it must be sent with `read`."""
        ...

    def read(self, name: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes from `start` to before `end`. Raises `ContentLost`."""
        ...

    async def remove(self, names: Sequence[str]) -> None:
        """Remove contents, and local copies of them. Names without a content are ignored."""
        ...

    async def remove_folder(self, name: str) -> None:
        """Remove all contents in a folder, and local copies of them."""
        ...

    async def entries(self, folder: str) -> list[Entry]:
        """Return the entries directly in `folder`."""
        ...
