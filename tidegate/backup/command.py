"""`tidegate backup DIR` and `tidegate restore DIR`: store and storage of files together, into a folder and back.

The store is the one at `--redis-url`, or the embedded one in the data directory. Its content is that of one moment.
Contents of the storage are copied after it. A content that has gone meanwhile, because its file was deleted or its
batch has ended, is not named any more by a second look, which is taken then.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.files.marker import Marker, StorageTie
from gateway.files.object_storage import BadStorageUrl, open_storage
from gateway.files.storage import Storage
from gateway.store_keys import GatewayKeys
from scheduler.clock import SystemClock
from scheduler.reload.store import TierStore
from scheduler.store import connection
from scheduler.store.durability import durable
from scheduler.store.keys import PROBE_TTL_S, Keys, Namespace
from tidegate.backup import contents, folder, snapshot
from tidegate.backup.folder import BackupError
from tidegate.settings.commands import BackupSettings, RestoreSettings
from tidegate.supervision.keeper import EX_CONFIG
from tidegate.valkey import ValkeyError, reached_valkey, running_valkey

LATE_S = 5.0  # seconds; a gateway writes its probe every second
ROUNDS = 5  # looks at the store; each but the first follows contents that have gone while they were copied


def run_backup(settings: BackupSettings) -> int:
    """Write a backup. Return 0, 78 if folder, store or storage cannot be used, or 1 if one of them does not answer."""
    return _run("backup", settings, reached_valkey, _backup)


def run_restore(settings: RestoreSettings) -> int:
    """Write a backup into the store and the storage. Return as `run_backup` does."""
    return _run("restore", settings, running_valkey, _restore)


def _run(
    name: str,
    settings: Any,
    embedded: Callable[[Path], AbstractContextManager[str]],
    work: Callable[[Any, Redis], Coroutine[Any, Any, str]],
) -> int:
    async def connected(url: str) -> str:
        async with connection.connect(url) as redis:
            return await work(settings, redis)

    try:
        with embedded(settings.data_dir) if settings.redis_url is None else nullcontext(settings.redis_url) as url:
            print(asyncio.run(connected(url)))
    except (ValkeyError, BadStorageUrl, BackupError, snapshot.BadEntry) as error:
        return _failed(name, error, EX_CONFIG)
    except (RedisError, OSError, snapshot.BadSnapshot) as error:
        return _failed(name, error, 1)
    return 0


def _failed(name: str, error: Exception, code: int) -> int:
    print(f"tidegate {name}: {error or 'the store does not answer in time'}", file=sys.stderr)
    return code


async def _backup(settings: BackupSettings, redis: Redis) -> str:
    await _check_source(settings, redis)
    return await save(settings, redis, settings.directory)


async def _check_source(settings: BackupSettings, redis: Redis) -> None:
    """Raise `BackupError` if no gateway has ever served on the store, or if the storage is not the one of the store."""
    if await snapshot.is_empty(redis) and not await redis.exists(GatewayKeys.of(redis).storage):
        prefix = Namespace.of(redis).prefix
        raise BackupError(f"the store has nothing of the deployment {prefix!r}: is --redis-url or --data-dir right?")
    storage = open_storage(settings.files_url, settings.data_dir)
    if not await StorageTie(redis, storage, SystemClock()).is_of_store():
        raise BackupError(
            f"the storage {storage.place} does not belong to the store: give the gateways' --files-url or --data-dir. "
            "If it is the right one, run `tidegate adopt` with the same flags first"
        )


async def save(settings: BackupSettings, redis: Redis, target: Path) -> str:
    """Write a backup of the store and the storage into the new folder `target`. Return what an operator reads."""
    folder.new_folder(target)
    # An object store's local copies are the folder's contents. Those of the data directory belong to a gateway.
    storage = open_storage(settings.files_url, settings.data_dir if settings.files_url is None else target)
    made_at = SystemClock().wall_ms() // 1000
    found, missing = await _consistent(redis, storage, target)
    folder.write(target, made_at, Namespace.of(redis).prefix, found, missing)
    text = f"{target} has {len(found.entries)} keys of the store, and {len(found.contents) - len(missing)} contents."
    lacking = f" The storage lacks these, or has damaged ones, which the store names: {', '.join(missing)}."
    return text + (lacking if missing else "")


async def _consistent(redis: Redis, storage: Storage, target: Path) -> tuple[snapshot.Snapshot, list[str]]:
    """Return what the store holds, after its contents were copied, and those that the storage has lost."""
    gone: set[str] = set()
    for number in range(ROUNDS):
        found = await snapshot.take_snapshot(redis)
        missing = await contents.save(storage, found.contents, target)
        if number and gone >= set(missing):  # the store still names what was missing before: it is lost
            return found, missing
        if not missing:
            return found, []
        gone |= set(missing)
    raise BackupError("files are deleted and batches end faster than they can be copied: try again")


async def _restore(settings: RestoreSettings, redis: Redis) -> str:
    listing, entries = await asyncio.to_thread(folder.read, settings.directory)
    await _check(settings, redis, listing)
    storage = open_storage(settings.files_url, settings.data_dir)
    storage.directory.mkdir(0o700, parents=True, exist_ok=True)
    await snapshot.try_entry(redis, entries)
    if settings.replace is not None:
        print(await save(settings, redis, settings.replace))
    await contents.put_back(storage, listing.contents, settings.directory)
    await snapshot.remove_all(redis)
    await _refuse_gateways(redis)
    await snapshot.write_entries(redis, entries)
    await StorageTie(redis, storage, SystemClock()).adopt()
    await durable(redis)
    return f"The store has the {len(entries)} keys of {settings.directory}, and {storage.place} its contents."


async def _check(settings: RestoreSettings, redis: Redis, listing: folder.Listing) -> None:
    """Raise `BackupError` if the store is not one into which this backup may be written."""
    prefix = Namespace.of(redis).prefix
    if listing.prefix != prefix:
        raise BackupError(f"the backup is of the deployment {listing.prefix!r}, and --redis-url names {prefix!r}")
    if parts := await TierStore(redis).followers():
        raise BackupError(f"these parts run on the store: {', '.join(f.part for f in parts)}. Stop them first")
    if await redis.pttl(Keys.of(redis).probe) > 1000 * (PROBE_TTL_S - LATE_S):
        raise BackupError(f"a gateway has used the store in the last {LATE_S:g} s: stop all gateways, then try again")
    if settings.replace is None and not await snapshot.is_empty(redis):
        raise BackupError("the store is not empty. --replace DIR replaces what it holds, after a backup of it into DIR")


async def _refuse_gateways(redis: Redis) -> None:
    """Give the store a marker that no storage has, so that no gateway serves a part of a backup after a crash."""
    now_s = SystemClock().wall_ms() // 1000
    await redis.set(GatewayKeys.of(redis).storage, msgspec.json.encode(Marker("restore", now_s, now_s)))
