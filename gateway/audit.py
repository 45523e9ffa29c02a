"""The audit log: who changed what of the server, and when. All gateways write one list in Redis, which is bounded.

Each entry is also a line of the gateway's log, which may be kept for longer. Knows names of actions and callers; does
not know HTTP, or what an action does.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from redis.asyncio import Redis

from gateway.store_keys import GatewayKeys
from scheduler.clock import Clock
from scheduler.store.errors import STORE_AWAY

log = structlog.get_logger(__name__)

MAX_ENTRIES = 10_000  # beyond it, the oldest is removed
ENTRY_ID = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An action on the server, such as `tiers.change`, and its `subject`, such as the new generation of the tiers.

    `key` is the name of the caller's API key (None: access is open, or nobody called), `address` where the call came
    from, and `gateway` the name of the gateway process.
    """

    id: str
    at_ms: int
    action: str
    subject: str
    key: str | None
    address: str | None
    gateway: str


class AuditLog:
    """The audit log, as the gateway process `gateway` writes it."""

    def __init__(self, redis: Redis, clock: Clock, gateway: str) -> None:
        self._redis = redis
        self._list = GatewayKeys.of(redis).audit
        self._clock = clock
        self._gateway = gateway

    async def add(self, action: str, subject: str, key: str | None = None, address: str | None = None) -> None:
        """Add an entry about what was done. While the store takes no writes, it is only logged.

        An entry whose reply is lost may be there twice.
        """
        known = {"action": action, "subject": subject, "key": key, "address": address, "gateway": self._gateway}
        log.info("audit", **known)
        fields: dict[Any, Any] = {name: value for name, value in known.items() if value is not None}
        with suppress(*STORE_AWAY):
            fields["at_ms"] = self._clock.wall_ms()
            await self._redis.xadd(self._list, fields, maxlen=MAX_ENTRIES, approximate=False)

    async def page(self, limit: int, after: str | None = None) -> list[AuditEntry]:
        """Return the newest entries first, those before the entry with the id `after`."""
        newest = "+" if after is None else f"({after}"
        found: Any = await self._redis.xrevrange(self._list, newest, "-", limit)  # bytes
        return [_entry(entry_id.decode(), fields) for entry_id, fields in found]


def _entry(entry_id: str, fields: dict[bytes, bytes]) -> AuditEntry:
    known = {name.decode(): value.decode() for name, value in fields.items()}
    return AuditEntry(
        entry_id,
        int(known["at_ms"]),
        known["action"],
        known["subject"],
        known.get("key"),
        known.get("address"),
        known["gateway"],
    )
