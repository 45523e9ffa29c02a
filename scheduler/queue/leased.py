"""Leases and wake-ups of a queue in Redis or Valkey, whatever is queued: the part that requests and tasks share.

Every move is one Lua script and one round trip; the caller decides what to move. Times come from the injected clock and
are arguments of the scripts, so that tests of order and leases need not wait. A worker whose clock is wrong regards the
leases of other workers as expired; whoever requeues them must look whether they are still renewed.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from secrets import token_hex
from typing import Protocol, TypeVar

import msgspec
from redis.asyncio import Redis

from scheduler.clock import Clock
from scheduler.queue.base import NOTHING_DUE, DueLimits
from scheduler.queue.scripts import ClaimedRow, Scripts
from scheduler.queue.wakeups import Wakeups
from scheduler.request import Lease
from scheduler.store import connection, keys
from scheduler.store.errors import STORE_AWAY


class Versioned(Protocol):
    """What a payload holds. A worker serves it if it knows the format `version`."""

    @property
    def version(self) -> int: ...


Item = TypeVar("Item", bound=Versioned)


def decode_known(decoder: msgspec.msgpack.Decoder[Item], payload: bytes, newest: int) -> Item:
    """Return what `payload` holds.

    Raises one of `UNREADABLE` if it is damaged, or of a version after `newest`: with the names that are unknown here.
    """
    item = decoder.decode(payload)
    if item.version > newest:
        names = sorted(_unknown_names(msgspec.msgpack.decode(payload), item)) or [f"version {item.version}"]
        raise msgspec.ValidationError(f"this worker does not know {', '.join(names)}")
    return item


def _unknown_names(fields: Mapping[str, object], known: object) -> Iterator[str]:
    for name, value in fields.items():
        if not hasattr(known, name):
            yield name
        elif isinstance(value, Mapping) and isinstance(inner := getattr(known, name), msgspec.Struct):
            yield from _unknown_names(value, inner)


class LeasedQueue:
    """A queue with the keys `names`. Claims of this handle are leased to `worker_id`. Implements `base.LeaseStore`."""

    def __init__(self, client: Redis, clock: Clock, worker_id: str, names: keys.Keys) -> None:
        self._client = client
        self._clock = clock
        self._worker_id = worker_id
        self._scripts = Scripts(client, names)
        self._keys = names
        self._channels = (names.wake + worker_id.partition("#")[0], names.wake_all)
        self._wakeups = Wakeups(clock)
        # Random once, not for each claim: the system call would hand Python's lock to the engine's thread.
        self._claim_names = map(f"{token_hex(8)}{{:012x}}".format, count())
        self._lost_claim = ""  # name of a claim that got no reply
        self._listener: asyncio.Task[None] | None = None

    async def _claim(
        self, limits: Mapping[str, int], lease_s: float, load: int | None = None, due: DueLimits = NOTHING_DUE
    ) -> list[ClaimedRow]:
        """Claim up to `limits` of each tier or lane. If the last claim got no reply, return its requests."""
        name, self._lost_claim = self._lost_claim or next(self._claim_names), ""
        try:
            now_ms = self._clock.wall_ms()
            return await self._scripts.claim(self._worker_id, name, now_ms, int(lease_s * 1000), limits, load, due)
        except STORE_AWAY:
            self._lost_claim = name
            raise

    async def renew(self, leases: Sequence[Lease], lease_s: float) -> list[bool]:
        expires_ms = self._clock.wall_ms() + int(lease_s * 1000)
        return await self._scripts.renew(expires_ms, leases) if leases else []

    async def release(self, leases: Sequence[Lease]) -> list[bool]:
        return await self._scripts.release(leases) if leases else []

    async def expired_leases(self, lease_s: float) -> dict[str, int]:
        return await self._scripts.expired_leases(self._clock.wall_ms(), lease_s)

    async def requeue_expired(self, leases: Mapping[str, int]) -> list[str]:
        return await self._scripts.requeue_expired(leases) if leases else []

    async def requeue_worker(self, worker_id: str) -> list[str]:
        return await self._scripts.requeue_worker(worker_id)

    async def wait_for_work(self, timeout_s: float) -> bool:
        self._start_listening()
        return await self._wakeups.wait(timeout_s)

    def wake(self) -> None:
        """Make `wait_for_work` return."""
        self._wakeups.wake()

    def cancelled(self) -> list[str]:
        return self._wakeups.pop_cancelled()

    async def close(self) -> None:
        """End the listener. The client stays open, because the caller owns it."""
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener
            self._listener = None

    def _start_listening(self) -> None:
        """Start to listen for wake-ups. The first claim or wait calls this.

        A gateway's handle neither claims nor waits, so it opens no connection for listening.
        """
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen(), name="queue-listener")

    async def _listen(self) -> None:
        """Turn the messages of the channels into wake-ups.

        Messages may be missed before each (new) subscription. The confirmation of the subscription therefore counts as
        a wake-up too. A missed cancel is noticed at the next `renew`.
        """
        async for message in connection.messages(self._client, *self._channels):
            data = message["data"]
            if message["type"] == "message" and data.startswith(b"cancel:"):
                self._wakeups.cancel(data.removeprefix(b"cancel:").decode())
            else:
                self._wakeups.wake()
