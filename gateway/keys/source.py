"""Where API keys come from, and how a gateway keeps its keyring up to date with the file and the store.

Each gateway reads its own file: when the file has changed, and on request. A broken file changes nothing: the keys that
were read last stay in force, and the log and GET /admin/keys say why. Keys in the store are read when one of them has
changed; while the store does not answer, those that were read last stay in force. Keys from the environment stay as
they are until the process ends.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog

from gateway.identity import ApiKey, Keyring
from gateway.keys.edit import new_secret
from gateway.keys.file import EMPTY, ID_DIGITS, KeyEntry, KeyringError, KeysFile, read_file
from gateway.keys.prices import Price, PriceList
from gateway.keys.stored import KeysInStore, Record, StoredKey, StoredKeys
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.store.errors import STORE_AWAY

log = structlog.get_logger(__name__)

POLL_S = 1.0  # seconds between two looks at the file's time of change
OPERATOR = "operator"  # name of the key or keys from the environment
UNREADABLE = "a record of another version"

OnChange = Callable[[str, str], Awaitable[None]]
Item = TypeVar("Item")
Stamp = tuple[int, int, int]  # inode, size and time of change: another stamp means that the file has changed


class KeyConflict(KeyringError):
    """A change of the stored keys does not fit to the keys that there are."""


class KeySource:
    """The file (None: no file), the stored keys and the operator's own, of which `keyring` is made, and the `prices`.

    If there are neither a file nor keys of the operator, access is open, and stored keys are not read. The operator's
    keys may use everything without limits. Several of them share one name, so that one can replace another.
    """

    def __init__(
        self,
        path: Path | None,
        operator_keys: Sequence[str],
        tiers: Callable[[], TierSet],
        clock: Clock,
        stored: StoredKeys | None = None,
    ) -> None:
        """Read the file. Raises `KeyringError` if its keys are invalid. `tiers` returns the tiers in force."""
        self.path = path
        self.problem = ""  # why the file in its present state is not in force; empty: it is in force
        self.stored = KeysInStore()
        self._store = stored
        self._operator = [_operator_key(secret) for secret in operator_keys]
        self._tiers = tiers
        self._clock = clock
        self.on_change: OnChange | None = None  # is told what a changed file changes, as action and subject of an audit
        self._lock = asyncio.Lock()  # one reading at a time, so that an older one never replaces a newer one
        self._seen = self._stamp()
        self.loaded_ms = clock.wall_ms()
        self._is_open = path is None and not self._operator
        self._file = self._read()
        self.prices = PriceList([entry.to_price() for entry in self._file.prices])
        self.keyring = Keyring(None if self._is_open else self._all_keys())

    @property
    def left_out(self) -> dict[str, str]:
        """Why some stored keys are not accepted, by id."""
        faults = {key_id: self._fault(key.entry) for key_id, key in self.stored.keys.items()}
        unreadable = dict.fromkeys(self.stored.unreadable, f"it is {UNREADABLE}")
        return {key_id: fault for key_id, fault in faults.items() if fault} | unreadable

    async def follow(self) -> None:
        """Look at the file and the stored keys every `POLL_S` seconds, for ever, and read again what has changed."""
        while not self._is_open:
            await self._clock.sleep(POLL_S)
            with suppress(*STORE_AWAY):
                await self.follow_store()
            if self.path is not None:
                stamp = await asyncio.to_thread(self._stamp)
                if stamp != self._seen or self.problem:
                    await self.reload()

    async def follow_store(self) -> None:
        """Read the stored keys if they have changed."""
        if self._store is None or self._is_open or await self._store.version() == self.stored.version:
            return
        async with self._lock:
            self.stored = await self._store.read()
            for key_id, fault in self.left_out.items():
                log.warning("a stored API key is not accepted", id=key_id, reason=fault)
            self.keyring.replace(self._all_keys())

    async def create(self, options: Mapping[str, Any], *, rotate: bool = False) -> tuple[str, ApiKey]:
        """Store a new key with these fields of the keys file. Return its secret, which is in no record, and the key.

        With `rotate`, the stored key of this name gets one more secret and keeps its options. Raises `KeyConflict` if
        the name is taken, or is not there, and pydantic's errors and `KeyringError` if the options are invalid.
        """
        secret, file = new_secret(), self._file
        digest = {"sha256": hashlib.sha256(secret.encode()).hexdigest()}
        wanted = KeyEntry.model_validate({**options, **digest})

        def add(known: KeysInStore) -> tuple[str, StoredKey]:
            same = self._same_name(wanted, known, rotate)
            entry = KeyEntry.model_validate(same[0].options | digest) if rotate else wanted
            if fault := file.fault_of(entry, self._tiers()):
                raise KeyringError(fault)
            return entry.id, StoredKey(entry, self._clock.wall_ms())

        stored = await self._change(add)
        return secret, stored.entry.to_key(file.by_name)

    async def revoke(self, key_id: str) -> str:
        """Remove the stored key with this id, and return its name. Raises `LookupError` if there is none."""
        name = ""

        def remove(known: KeysInStore) -> tuple[str, None]:
            nonlocal name
            if key_id in known.keys:
                name = known.keys[key_id].entry.name
            elif key_id in known.unreadable:
                name = UNREADABLE
            elif not name:  # with a name, the reply to the removal was lost
                raise LookupError(key_id)
            return key_id, None

        await self._change(remove)
        return name

    async def _change(self, decide: Callable[[KeysInStore], tuple[str, Record]]) -> Record:
        if self._store is None or self._is_open:
            raise KeyConflict("access is open: start the server with --api-keys or TIDEGATE_API_KEY first")
        record = await self._store.change(decide)
        await self.follow_store()
        return record

    def _same_name(self, wanted: KeyEntry, known: KeysInStore, rotate: bool) -> list[KeyEntry]:
        """Return the stored keys of the same name. Raises `KeyConflict` if there are none to rotate, or any otherwise.

        `wanted` itself is no conflict: it is there already if the reply to its addition was lost.
        """
        others = [key.entry for key in known.keys.values() if key.entry.digest != wanted.digest]
        same = [other for other in others if other.name == wanted.name]
        if self._has_elsewhere(wanted.name):
            raise KeyConflict(f"the key {wanted.name!r} is in the keys file or the environment, and is changed there")
        if any(other.id == wanted.id for other in others):
            raise KeyConflict("the new key's id is taken: try again")
        if bool(same) != rotate:
            raise KeyConflict(f"there is {'no' if rotate else 'already a'} key {wanted.name!r}")
        return same

    async def reload(self) -> None:
        """Read the file again. If it is invalid, keep the keys and set `problem`."""
        async with self._lock:
            await self._reload()

    async def _reload(self) -> None:
        self._seen = await asyncio.to_thread(self._stamp)  # before the content, so that no later change is missed
        try:
            file = await asyncio.to_thread(self._read)
        except KeyringError as error:
            if str(error) != self.problem:
                log.error("the API keys are refused; the old ones stay in force", reason=str(error))
            self.problem = str(error)
            return
        self.problem = ""
        if self.path is not None:
            await self._use(file)

    async def _use(self, file: KeysFile) -> None:
        self._file, self.loaded_ms = file, self._clock.wall_ms()
        old_prices, prices = self.prices.prices, tuple(entry.to_price() for entry in file.prices)
        old_keys, keys = self.keyring.keys, tuple(self._all_keys())
        self.prices.replace(prices)
        if keys != old_keys:
            self.keyring.replace(keys)
            log.info("the API keys have changed", keys=len(keys))
            await self._report("keys.change", _difference(old_keys, keys, _label))
        if prices != old_prices:
            await self._report("prices.change", _difference(old_prices, prices, _price_label))

    async def _report(self, action: str, subject: str) -> None:
        if self.on_change is not None:
            await self.on_change(action, subject)

    def _read(self) -> KeysFile:
        file = read_file(self.path, self._tiers()) if self.path is not None else EMPTY
        if self._operator and any(entry.name == OPERATOR for entry in file.keys):
            raise KeyringError(f"{self.path}: the name {OPERATOR!r} belongs to the key from the environment")
        if plain := sorted({entry.name for entry in file.keys if entry.key is not None}):
            log.warning("API keys are stored in plain text; `sha256` instead of `key` hides them", keys=plain)
        return file

    def _all_keys(self) -> list[ApiKey]:
        stored = [key.entry for key in self.stored.keys.values() if not self._fault(key.entry)]
        return [*self._file.to_keys(), *self._operator, *(entry.to_key(self._file.by_name) for entry in stored)]

    def _fault(self, entry: KeyEntry) -> str:
        """Return why a stored key is not accepted; empty if it is."""
        if self._has_elsewhere(entry.name):
            return f"the name {entry.name!r} is also in the keys file or the environment"
        return self._file.fault_of(entry, self._tiers())

    def _has_elsewhere(self, name: str) -> bool:
        return name == OPERATOR or any(entry.name == name for entry in self._file.keys)

    def _stamp(self) -> Stamp | None:
        try:
            status = self.path.stat() if self.path is not None else None
        except OSError:
            return None
        return (status.st_ino, status.st_size, status.st_mtime_ns) if status is not None else None


def _difference(before: Sequence[Item], after: Sequence[Item], label_of: Callable[[Item], str]) -> str:
    """Return which items were added, removed or changed, by their labels. What an item has beside it is not named."""
    old, new = ({label_of(item): item for item in items} for items in (before, after))
    parts = {
        "added": new.keys() - old.keys(),
        "removed": old.keys() - new.keys(),
        "changed": {label for label in new.keys() & old.keys() if new[label] != old[label]},
    }
    texts = [f"{what}: {', '.join(sorted(labels))}" for what, labels in parts.items() if labels]
    return "; ".join(texts) or "another order"


def _label(key: ApiKey) -> str:
    return f"{key.name} {key.sha256.hex()[:ID_DIGITS]}"


def _price_label(price: Price) -> str:
    return f"{price.model or 'all models'} in {price.tier or 'all tiers'}"


def _operator_key(secret: str) -> ApiKey:
    return ApiKey(OPERATOR, hashlib.sha256(secret.encode()).digest(), role="admin")
