"""Typed functions for the Lua files of this folder.

Knows the order of each script's arguments and the shape of its reply. What a script needs of `queue_prelude` and of
`shared.lua` is put in front of it.
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from scheduler.queue.base import (
    NOTHING_DUE,
    WAKE_MS,
    AheadLimit,
    Backlog,
    DueLimit,
    DueLimits,
    Preference,
    QueueFull,
    TooFarBehind,
)
from scheduler.request import Checkpoint, Lease
from scheduler.store import keys
from scheduler.store.scripts import script_text


def queue_prelude(names: keys.Keys, wake_ms: int = WAKE_MS) -> str:
    """Return the Lua lines that name the keys of a queue, and lifetimes. A put wakes a worker once within `wake_ms`."""
    lifetimes = {"OUTPUT_TTL_MS": keys.OUTPUT_TTL_S, "PART_TTL_MS": keys.PART_TTL_S, "CLAIM_TTL_MS": keys.CLAIM_TTL_S}
    lifetimes |= {"LEFT_TTL_MS": keys.LEFT_TTL_S}
    strings = {"QUEUE": names.queue, "WAITING": names.waiting, "REQUEST": names.request, "OUTPUT": names.output}
    strings |= {"ALONE": names.alone, "CLAIM": names.claim, "LEASES": names.leases, "WAITERS": names.waiters}
    strings |= {"HELD": names.held, "SEQUENCE": names.sequence, "EPOCH": names.epoch}
    strings |= {"WAKE": names.wake, "LEFT": names.left}
    lines = [f"local {name} = '{key}'\n\n" for name, key in strings.items()]
    lines += [f"local {name} = {1000 * seconds:.0f}\n\n" for name, seconds in lifetimes.items()]
    lines.append(f"local WAKE_MS = {wake_ms}\n\n")
    return "".join(lines)


@cache
def with_definitions(definitions: str, script: str) -> str:
    """Return `script` behind those `local` definitions, with blank lines between them, that it needs.

    A server creates each function anew at each call of a script, which takes it longer than a command.
    """
    for definition in reversed(definitions.split("\n\n")):
        name = re.search(r"^local (?:function )?(\w+)", definition, re.MULTILINE)
        if name is not None and re.search(rf"\b{name[1]}\b", script):
            script = f"{definition}\n{script}"
    return script


# A request for the script `put`: id, deadline_ms, prompt tokens, maximum output tokens, payload, part of a job, and the
# gateway that waits for it.
PutRow = tuple[str, int, int, int, bytes, str, str]
# A claimed request: id, payload, fence, attempt, stored output, number of tokens that its gateway has received (`?`:
# not known), input of a task.
ClaimedRow = tuple[bytes, bytes | None, int, int, bytes | None, bytes, bytes | None]
WRITER_DIGITS = 16  # in front of the tokens of a stored output
INFINITY = 1e15  # stands for infinity, which not every version of Lua can parse


class Scripts:
    """The scripts for one client.

    A call sends only the hash of a script. The text is sent if the server does not know the hash yet.
    """

    def __init__(self, client: Redis, names: keys.Keys) -> None:
        definitions = queue_prelude(names) + script_text("scheduler.queue", "shared")

        def load(name: str) -> AsyncScript:
            return client.register_script(with_definitions(definitions, script_text("scheduler.queue", name)))

        self._client = client
        self._leases = names.leases
        self._put, self._claim, self._ack, self._renew = load("put"), load("claim"), load("ack"), load("renew")
        self._release, self._cancel = load("release"), load("cancel")
        self._requeue_expired, self._requeue_worker = load("requeue_expired"), load("requeue_worker")
        self._checkpoint, self._resume, self._note_step = load("checkpoint"), load("resume"), load("note_step")

    async def put(
        self,
        tier: str,
        limit: int | None,
        now_ms: int,
        ahead: AheadLimit,
        max_bytes: int | None,
        requests: Sequence[PutRow],
        prefer: Preference | None = None,
    ) -> QueueFull | TooFarBehind | None:
        """Return None if all requests are enqueued, else why they are refused."""
        match await self._put(args=put_args(tier, limit, now_ms, ahead, requests, max_bytes, prefer)):
            case [b"full", depth]:
                return QueueFull(tier, depth, limit or 0)
            case [b"large", depth, num_bytes]:
                return QueueFull(tier, depth, max_bytes or 0, num_bytes)
            case [b"behind", *counts]:
                return TooFarBehind(tier, Backlog(*counts))
        return None

    async def claim(
        self,
        worker_id: str,
        name: str,
        now_ms: int,
        lease_ms: int,
        limits: Mapping[str, int],
        load: int | None,
        due: DueLimits = NOTHING_DUE,
    ) -> list[ClaimedRow]:
        """`name` is that of this claim alone: a claim that is sent again returns the same requests."""
        none = DueLimit(0, 0)
        rows = ((tier, limit, due.get(tier, none)) for tier, limit in limits.items())
        wanted = [part for tier, limit, d in rows for part in (tier, limit, d.requests, d.until_ms)]
        args = [worker_id, name, now_ms, lease_ms, "" if load is None else load, *wanted]
        claimed: list[ClaimedRow] = await self._claim(args=args)
        return claimed

    async def ack(self, leases: Sequence[Lease]) -> list[bool]:
        return _flags(await self._ack(args=_flat(leases)))

    async def renew(self, expires_ms: int, leases: Sequence[Lease]) -> list[bool]:
        return _flags(await self._renew(args=[expires_ms, *_flat(leases)]))

    async def release(self, leases: Sequence[Lease]) -> list[bool]:
        return _flags(await self._release(args=_flat(leases)))

    async def checkpoint(self, checkpoints: Sequence[Checkpoint]) -> list[int]:
        rows = ((c.lease.request_id, c.lease.fence, c.index, _packed(c.token_ids)) for c in checkpoints)
        stored: list[int] = await self._checkpoint(args=[part for row in rows for part in row])
        return stored

    async def resume(self, received: Sequence[Checkpoint]) -> list[bool]:
        rows = ((c.lease.request_id, c.lease.fence, _packed(c.token_ids)) for c in received)
        return _flags(await self._resume(args=[part for row in rows for part in row]))

    async def note_step(self, worker_id: str, ttl_ms: int, alone: str, waits: Mapping[Lease, bool]) -> None:
        marks = [part for lease, is_waiting in waits.items() for part in (*_flat([lease]), int(is_waiting))]
        await self._note_step(args=[worker_id, ttl_ms, alone, *marks])

    async def expired_leases(self, now_ms: int, lease_s: float) -> dict[str, int]:
        """Return the expiry in ms of each lease that expired before `now_ms` or expires over `lease_s` after it."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.zrange(self._leases, "-inf", now_ms, byscore=True, withscores=True)
        pipeline.zrange(self._leases, f"({now_ms + int(lease_s * 1000)}", "+inf", byscore=True, withscores=True)
        past, far = await pipeline.execute()
        return {request_id.decode(): int(expires_ms) for request_id, expires_ms in (*past, *far)}

    async def requeue_expired(self, leases: Mapping[str, int]) -> list[str]:
        args = [part for lease in leases.items() for part in lease]
        return [i.decode() for i in await self._requeue_expired(args=args)]

    async def requeue_worker(self, worker_id: str) -> list[str]:
        return sorted(i.decode() for i in await self._requeue_worker(args=[worker_id]))

    async def cancel(self, request_ids: Sequence[str]) -> list[bool]:
        return _flags(await self._cancel(args=request_ids))


def put_args(
    tier: str,
    limit: int | None,
    now_ms: int,
    ahead: AheadLimit,
    requests: Sequence[PutRow],
    max_bytes: int | None = None,
    prefer: Preference | None = None,
) -> list[str | bytes | int | float]:
    """Return the arguments of the script `put`."""
    bounds = (min(ahead.max_requests, INFINITY), min(ahead.max_s, INFINITY), ahead.prompt_token_s, ahead.output_token_s)
    rows = (part for request in requests for part in request)
    preferred = "" if prefer is None else json.dumps([prefer.until_ms, prefer.slack, *prefer.workers])
    head = (tier, _or_any(limit), now_ms, *bounds, _or_any(max_bytes), preferred)
    return [*head, len(ahead.above), *ahead.above, *rows]


def _or_any(limit: int | None) -> int:
    return -1 if limit is None else limit


def _flat(leases: Sequence[Lease]) -> list[str | int]:
    return [part for lease in leases for part in (lease.request_id, lease.fence)]


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpacked(output: bytes | None) -> tuple[int, ...]:
    """Return the tokens of a stored output; none if there is no checkpoint."""
    tokens = (output or b"")[WRITER_DIGITS:]
    return struct.unpack(f"<{len(tokens) // 4}I", tokens)


def _flags(replies: Sequence[Any]) -> list[bool]:
    return [reply == 1 for reply in replies]
