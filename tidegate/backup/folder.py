"""The folder of a backup: `store.msgpack` with the store's entries, the contents of the storage, and `backup.json`.

`backup.json` is written last, so a folder that has it is complete.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gateway.files.local_storage import PRIVATE_DIR, sync
from tidegate.backup.contents import is_whole
from tidegate.backup.snapshot import Content, Entry, Snapshot

VERSION = 1
STORE_NAME, LIST_NAME = "store.msgpack", "backup.json"


class BackupError(Exception):
    """A folder cannot be used as a backup. The message says why."""


class Listing(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a backup holds. `missing` are contents that the store names and the storage did not have."""

    version: int
    made_at: int  # Unix seconds
    prefix: str  # of the deployment's keys
    store_sha256: str
    contents: list[Content]
    missing: list[str] = []


def new_folder(folder: Path) -> None:
    """Make the folder for a backup. Raises `BackupError` if something is in it."""
    folder.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BackupError(f"{folder} is not empty: name a new folder")


def write(folder: Path, made_at: int, prefix: str, found: Snapshot, missing: list[str]) -> None:
    data = msgspec.msgpack.encode(found.entries)
    listing = Listing(VERSION, made_at, prefix, hashlib.sha256(data).hexdigest(), found.contents, missing)
    for name, text in ((STORE_NAME, data), (LIST_NAME, msgspec.json.format(msgspec.json.encode(listing)))):
        (folder / name).write_bytes(text)
        sync(folder / name)
        sync(folder)


def read(folder: Path) -> tuple[Listing, list[Entry]]:
    """Return what a backup holds, after all of it was checked. Raises `BackupError`."""
    try:
        listing = msgspec.json.decode((folder / LIST_NAME).read_bytes(), type=Listing)
        data = (folder / STORE_NAME).read_bytes()
    except FileNotFoundError as error:
        raise BackupError(f"{folder} is no complete backup: {Path(str(error.filename)).name} is missing") from None
    except msgspec.DecodeError as error:
        raise BackupError(f"{folder}/{LIST_NAME} cannot be read: {error}") from None
    if listing.version != VERSION:
        raise BackupError(f"{folder} has version {listing.version}, and this tidegate reads version {VERSION}")
    damaged = [] if hashlib.sha256(data).hexdigest() == listing.store_sha256 else [STORE_NAME]
    damaged += _damaged(folder, listing)
    if damaged:
        raise BackupError(f"{folder} is damaged: {', '.join(damaged[:5])} ({len(damaged)} in all)")
    return listing, msgspec.msgpack.decode(data, type=list[Entry])


def _damaged(folder: Path, listing: Listing) -> Iterator[str]:
    missing = set(listing.missing)
    return (c.name for c in listing.contents if c.name not in missing and not is_whole(c, folder / c.name))
