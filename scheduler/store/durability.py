"""Waits until writes are on the disk of Redis or Valkey, and at its replicas.

Such a wait takes about a second, and longer with a slow disk. Few of them run at once, and each confirms the writes of
all who wait for it, so that many writers leave connections to everybody else.
"""

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from scheduler.store import keys
from scheduler.store.errors import NotDurable, refusal_of

LOST = "it has restarted, and has lost what it had taken last"
TOO_FEW_REPLICAS = "too few of its replicas have them yet"
REPLICAS_S = 2.0  # the longest wait for replicas, after that for the disk
ROUNDS = 4  # waits of one client at once; each occupies a connection


def wait_for_replicas(client: Redis, count: int) -> None:
    """Let `durable` wait, from now on, until `count` replicas have the writes of `client`."""
    _rounds_of(client).num_replicas = count


async def durable(client: Redis, key: str | None = None, *, timeout_s: float = 3.0, on_disk: bool = True) -> bool:
    """Wait until everything written so far, on any connection, is at the replicas and on the server's disk.

    Return True then, and False if the server cannot tell what is on its disk: before Redis 7.2, or without an AOF,
    where its operator has chosen so. Without `on_disk`, wait for the replicas only. How many have to confirm, in their
    memory, is said by `wait_for_replicas`; none by default.

    Raises `NotDurable` if the disk takes longer than `timeout_s` from when the wait began, or the replicas take longer
    than `REPLICAS_S` after that, and `StoreRefused` if the server takes no writes. If `ROUNDS` waits are under way, the
    next one begins when one of them has ended.

    A server that has crashed meanwhile, or was replaced by a replica, may have lost the caller's writes, and confirms
    what it has left: with a slow disk, it answers before it writes anything. So name the `key` that was written:
    `NotDurable` is raised if it is not there. What was only changed must be read again after this.
    """
    rounds = _rounds_of(client)
    if not on_disk and rounds.num_replicas == 0:
        return True
    written, confirmed, num_replicas = await rounds.confirm(timeout_s, on_disk)
    if isinstance(written, Exception):
        raise refusal_of(written) or written
    if key is not None and not await client.exists(key):
        raise NotDurable(LOST)
    if isinstance(num_replicas, Exception):
        raise num_replicas
    if num_replicas < rounds.num_replicas:
        raise NotDurable(TOO_FEW_REPLICAS)
    if isinstance(confirmed, ResponseError):
        return False
    if isinstance(confirmed, Exception):
        raise confirmed
    if int(confirmed[0]) < int(on_disk):
        raise NotDurable
    return True


class _Rounds:
    """The waits of one client."""

    def __init__(self, client: Redis) -> None:
        self._pool = client.connection_pool
        self._key = keys.Keys.of(client).durable
        self._slots = asyncio.Semaphore(ROUNDS)
        self._next: dict[tuple[float, bool], asyncio.Task[list[Any]]] = {}  # rounds that have not begun
        self.num_replicas = 0

    async def confirm(self, timeout_s: float, on_disk: bool) -> list[Any]:
        """Return what the server answers in a round that begins after this call: to a write, to WAITAOF and to WAIT."""
        kind = (timeout_s, on_disk)
        if kind not in self._next:
            self._next[kind] = asyncio.create_task(self._run(timeout_s, on_disk))
            self._next[kind].add_done_callback(_look_at_error)
        return await asyncio.shield(self._next[kind])  # others wait for it, too

    async def _run(self, timeout_s: float, on_disk: bool) -> list[Any]:
        try:
            await self._slots.acquire()
        finally:
            del self._next[timeout_s, on_disk]  # who comes from now on may have written after this round's write
        try:
            pipeline = Redis(connection_pool=self._pool).pipeline(transaction=False)
            pipeline.set(self._key, b"", px=int(keys.DURABLE_TTL_S * 1000))
            pipeline.execute_command("WAITAOF", int(on_disk), 0, int(timeout_s * 1000))
            pipeline.execute_command("WAIT", self.num_replicas, int(REPLICAS_S * 1000))
            return await pipeline.execute(raise_on_error=False)
        finally:
            self._slots.release()


def _look_at_error(round_: "asyncio.Task[list[Any]]") -> None:
    """Look at the error of a round for which nobody waits any more, so that asyncio does not report it."""
    if not round_.cancelled():
        round_.exception()


_rounds: WeakKeyDictionary[Redis, _Rounds] = WeakKeyDictionary()


def _rounds_of(client: Redis) -> _Rounds:
    rounds = _rounds.get(client)
    if rounds is None:
        rounds = _rounds[client] = _Rounds(client)
    return rounds
