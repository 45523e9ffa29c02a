"""Where API keys come from, and how a gateway keeps its keyring up to date with the file.

Each gateway reads its own file: when the file has changed, and on request. A broken file changes nothing: the keys that
were read last stay in force, and the log and GET /admin/keys say why. Keys from the environment stay as they are until
the process ends.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from gateway.identity import ApiKey, Keyring
from gateway.keys.file import EMPTY, ID_DIGITS, KeyringError, KeysFile, read_file
from gateway.keys.prices import PriceList
from scheduler.clock import Clock
from scheduler.config import TierSet

log = structlog.get_logger(__name__)

POLL_S = 1.0  # seconds between two looks at the file's time of change
OPERATOR = "operator"  # name of the key or keys from the environment

OnChange = Callable[[str], Awaitable[None]]
Stamp = tuple[int, int, int]  # inode, size and time of change: another stamp means that the file has changed


class KeySource:
    """The file (None: no file) and the operator's own keys, of which `keyring` is made, and the file's `prices`.

    If there are neither, access is open. The operator's keys may use everything without limits. Several of them share
    one name, so that one can replace another.
    """

    def __init__(
        self, path: Path | None, operator_keys: Sequence[str], tiers: Callable[[], TierSet], clock: Clock
    ) -> None:
        """Read the keys. Raises `KeyringError` if they are invalid. `tiers` returns the tiers in force."""
        self.path = path
        self.problem = ""  # why the file in its present state is not in force; empty: it is in force
        self._operator = [_operator_key(secret) for secret in operator_keys]
        self._tiers = tiers
        self._clock = clock
        self.on_change: OnChange | None = None  # is told which keys have come and gone
        self._lock = asyncio.Lock()  # one reading at a time, so that an older one never replaces a newer one
        self._seen = self._stamp()
        self.loaded_ms = clock.wall_ms()
        file = self._read()
        self.prices = PriceList([entry.to_price() for entry in file.prices])
        self.keyring = Keyring(self._all_keys(file) if path or self._operator else None)

    async def follow(self) -> None:
        """Look at the file every `POLL_S` seconds, for ever, and read it again if it has changed or was broken."""
        while self.path is not None:
            await self._clock.sleep(POLL_S)
            stamp = await asyncio.to_thread(self._stamp)
            if stamp != self._seen or self.problem:
                await self.reload()

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
        self.prices.replace([entry.to_price() for entry in file.prices])
        keys = self._all_keys(file)
        self.loaded_ms, before = self._clock.wall_ms(), self.keyring.keys
        if tuple(keys) != before:
            self.keyring.replace(keys)
            log.info("the API keys have changed", keys=len(keys))
            if self.on_change is not None:
                await self.on_change(_difference(before, keys))

    def _read(self) -> KeysFile:
        file = read_file(self.path, self._tiers()) if self.path is not None else EMPTY
        if self._operator and any(entry.name == OPERATOR for entry in file.keys):
            raise KeyringError(f"{self.path}: the name {OPERATOR!r} belongs to the key from the environment")
        if plain := sorted({entry.name for entry in file.keys if entry.key is not None}):
            log.warning("API keys are stored in plain text; `sha256` instead of `key` hides them", keys=plain)
        return file

    def _all_keys(self, file: KeysFile) -> list[ApiKey]:
        return [*file.to_keys(), *self._operator]

    def _stamp(self) -> Stamp | None:
        try:
            status = self.path.stat() if self.path is not None else None
        except OSError:
            return None
        return (status.st_ino, status.st_size, status.st_mtime_ns) if status is not None else None


def _difference(before: Sequence[ApiKey], after: Sequence[ApiKey]) -> str:
    """Return which keys were added, removed or changed, by name and id. A key's options are not named."""
    old, new = ({_label(key): key for key in keys} for keys in (before, after))
    parts = {
        "added": new.keys() - old.keys(),
        "removed": old.keys() - new.keys(),
        "changed": {label for label in new.keys() & old.keys() if new[label] != old[label]},
    }
    texts = [f"{what}: {', '.join(sorted(labels))}" for what, labels in parts.items() if labels]
    return "; ".join(texts) or "another order"


def _label(key: ApiKey) -> str:
    return f"{key.name} {key.sha256.hex()[:ID_DIGITS]}"


def _operator_key(secret: str) -> ApiKey:
    return ApiKey(OPERATOR, hashlib.sha256(secret.encode()).digest(), role="admin")
