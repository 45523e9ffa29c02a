"""Typed functions for the Lua files of this folder.

Knows the order of each script's arguments and the shape of its reply. The key names of keys.py and then `shared.lua`
are put in front of every script.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from scheduler.queue.base import AheadLimit, Backlog, QueueFull, TooFarBehind
from scheduler.request import Lease
from scheduler.store import keys
from scheduler.store.scripts import load_script


def key_names(namespace: str = keys.NAMESPACE) -> str:
    """Return the Lua lines that name the keys of the queue in `namespace`, to be put in front of a script."""
    names = {"QUEUE": keys.QUEUE_PREFIX, "WAITING": keys.WAITING_PREFIX, "REQUEST": keys.REQUEST_PREFIX}
    names |= {"LEASES": keys.LEASES, "SEQUENCE": keys.SEQUENCE, "WAKE": keys.WAKE}
    moved = {name: namespace + key.removeprefix(keys.NAMESPACE) for name, key in names.items()}
    return "".join(f"local {name} = '{key}'\n" for name, key in moved.items())


INFINITY = 1e15  # stands for infinity, which not every version of Lua can parse


class Scripts:
    """The scripts for one client.

    A call sends only the hash of a script. The text is sent if the server does not know the hash yet.
    """

    def __init__(self, client: Redis, namespace: str = keys.NAMESPACE) -> None:
        prelude = key_names(namespace)
        self._put = load_script(client, "scheduler.queue", "shared", "put", prelude=prelude)
        self._claim = load_script(client, "scheduler.queue", "shared", "claim", prelude=prelude)
        self._ack = load_script(client, "scheduler.queue", "shared", "ack", prelude=prelude)
        self._renew = load_script(client, "scheduler.queue", "shared", "renew", prelude=prelude)
        self._release = load_script(client, "scheduler.queue", "shared", "release", prelude=prelude)
        self._requeue_expired = load_script(client, "scheduler.queue", "shared", "requeue_expired", prelude=prelude)
        self._requeue_worker = load_script(client, "scheduler.queue", "shared", "requeue_worker", prelude=prelude)
        self._cancel = load_script(client, "scheduler.queue", "shared", "cancel", prelude=prelude)

    async def put(
        self,
        tier: str,
        limit: int | None,
        now_ms: int,
        ahead: AheadLimit,
        requests: Sequence[tuple[str, int, int, int, bytes]],
    ) -> QueueFull | TooFarBehind | None:
        """Return None if all requests are enqueued, else why they are refused.

        Each item of `requests` is (id, deadline_ms, prompt tokens, maximum output tokens, payload).
        """
        bounds = (
            min(ahead.max_requests, INFINITY),
            min(ahead.max_s, INFINITY),
            ahead.prompt_token_s,
            ahead.output_token_s,
        )
        rows = (part for request in requests for part in request)
        most = -1 if limit is None else limit
        match await self._put(args=[tier, most, now_ms, *bounds, len(ahead.above), *ahead.above, *rows]):
            case [b"full", depth]:
                return QueueFull(tier, depth, limit or 0)
            case [b"behind", *counts]:
                return TooFarBehind(tier, Backlog(*counts))
        return None

    async def claim(
        self, worker_id: str, now_ms: int, lease_ms: int, limits: Mapping[str, int]
    ) -> list[tuple[bytes, int, int]]:
        """Return (payload, fence, attempt) of each claimed request."""
        wanted = [part for tier_and_limit in limits.items() for part in tier_and_limit]
        claimed: list[tuple[bytes, int, int]] = await self._claim(args=[worker_id, now_ms, lease_ms, *wanted])
        return claimed

    async def ack(self, leases: Sequence[Lease]) -> list[bool]:
        return _flags(await self._ack(args=_flat(leases)))

    async def renew(self, expires_ms: int, leases: Sequence[Lease]) -> list[bool]:
        return _flags(await self._renew(args=[expires_ms, *_flat(leases)]))

    async def release(self, leases: Sequence[Lease]) -> list[bool]:
        return _flags(await self._release(args=_flat(leases)))

    async def requeue_expired(self, now_ms: int) -> list[str]:
        return [i.decode() for i in await self._requeue_expired(args=[now_ms])]

    async def requeue_worker(self, worker_id: str) -> list[str]:
        return [i.decode() for i in await self._requeue_worker(args=[worker_id])]

    async def cancel(self, request_ids: Sequence[str]) -> list[bool]:
        return _flags(await self._cancel(args=request_ids))


def _flat(leases: Sequence[Lease]) -> list[str | int]:
    return [part for lease in leases for part in (lease.request_id, lease.fence)]


def _flags(replies: Sequence[Any]) -> list[bool]:
    return [reply == 1 for reply in replies]
