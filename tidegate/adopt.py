"""`tidegate adopt`: tie the storage of files to the store, after an operator has seen that both are the right ones.

A gateway does not start on a storage that belongs to another store, or to an earlier state of its own
(gateway/files/marker.py). The store is the one at `--redis-url`, or the embedded one in the data directory.
"""

import asyncio
import sys
from contextlib import nullcontext

from redis.exceptions import RedisError

from gateway.files.local_storage import LocalStorage
from gateway.files.marker import StorageTie
from gateway.files.object_storage import BadStorageUrl, open_storage
from gateway.files.storage import Storage
from scheduler.clock import SystemClock
from scheduler.store import connection
from tidegate.settings.gateway import GatewaySettings
from tidegate.supervision.keeper import EX_CONFIG
from tidegate.valkey import ValkeyError, running_valkey


def run_adopt(settings: GatewaySettings) -> int:
    """Tie storage and store. Return 0, 78 if either cannot be used, or 1 if either does not answer."""
    try:
        if fault := _missing(open_storage(settings.files_url, settings.data_dir)):
            return _failed(fault, EX_CONFIG)
        with (
            running_valkey(settings.data_dir) if settings.redis_url is None else nullcontext(settings.redis_url) as url
        ):
            place = asyncio.run(_adopt(settings, url))
    except (ValkeyError, BadStorageUrl) as error:
        return _failed(error, EX_CONFIG)
    except (RedisError, OSError) as error:
        return _failed(error, 1)
    print(f"The storage {place} is tied to the store. Nothing that is in it is removed for seven days.")
    return 0


def _missing(storage: Storage) -> str | None:
    """Return what is wrong with a storage in a directory that is not there: it was surely not that of a gateway."""
    if not isinstance(storage, LocalStorage) or storage.directory.is_dir():
        return None
    return f"there is no directory {storage.directory}: give the gateways' --data-dir or --files-url, or make it"


async def _adopt(settings: GatewaySettings, redis_url: str) -> str:
    async with connection.connect(redis_url) as redis:
        storage = open_storage(settings.files_url, settings.data_dir)
        storage.directory.mkdir(0o700, parents=True, exist_ok=True)
        await StorageTie(redis, storage, SystemClock()).adopt()
        return storage.place


def _failed(error: Exception | str, code: int) -> int:
    print(f"tidegate adopt: {error}", file=sys.stderr)
    return code
