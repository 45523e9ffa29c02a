"""The API keys that administrators create over HTTP: records in the store, which all gateways share.

A record has the same fields as an entry of the keys file, and like there only the digest of the secret. Knows records;
does not know which of them are accepted (gateway/keys/source.py does).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from redis.asyncio import Redis

from gateway.keys.file import KeyEntry
from gateway.store_keys import GatewayKeys
from scheduler.store.durability import LOST, durable
from scheduler.store.errors import NotDurable
from scheduler.store.scripts import load_script


@dataclass(frozen=True, slots=True)
class StoredKey:
    entry: KeyEntry
    created_ms: int


@dataclass(frozen=True, slots=True)
class KeysInStore:
    """The keys by id, and the number of changes until then. `unreadable` are the ids of another version's records."""

    version: int = 0
    keys: Mapping[str, StoredKey] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()


Record = TypeVar("Record", bound=StoredKey | None)  # None: the key is removed


class StoredKeys:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        names = GatewayKeys.of(redis)
        self._names = [names.api_keys, names.api_keys_version]
        self._change = load_script(redis, "gateway.keys", "change_stored")

    async def version(self) -> int:
        return int(await self._redis.get(self._names[1]) or 0)

    async def read(self) -> KeysInStore:
        """Return all keys."""
        version = await self.version()  # first: a change after it is seen by the next look
        found: Any = await self._redis.hgetall(self._names[0])
        keys = {key_id.decode(): _decoded(record) for key_id, record in sorted(found.items())}
        unreadable = tuple(key_id for key_id, key in keys.items() if key is None)
        return KeysInStore(version, {key_id: key for key_id, key in keys.items() if key is not None}, unreadable)

    async def change(self, decide: Callable[[KeysInStore], tuple[str, Record]]) -> Record:
        """Add or remove one key, and return the new record.

        `decide` returns the key's id and the record. It is called again if another change came first. Raises what
        `decide` raises, and the errors of `durable`: a change is kept when this returns. `NotDurable` is also raised if
        the store has lost it since.
        """
        while True:
            known = await self.read()
            key_id, key = decide(known)
            record = b"" if key is None else _encoded(key)
            if await self._change(keys=self._names, args=[known.version, key_id, record]):
                await durable(self._redis)
                if (await self._redis.hget(self._names[0], key_id) or b"") != record:
                    raise NotDurable(LOST)
                return key


def _encoded(key: StoredKey) -> bytes:
    return msgspec.json.encode({"created_ms": key.created_ms, **key.entry.options, "sha256": key.entry.sha256})


def _decoded(record: bytes) -> StoredKey | None:
    try:
        known = msgspec.json.decode(record)
        return StoredKey(created_ms=known.pop("created_ms"), entry=KeyEntry.model_validate(known))
    except (ValidationError, msgspec.DecodeError, KeyError):
        return None
