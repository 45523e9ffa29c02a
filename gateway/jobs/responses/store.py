"""Stored responses in Redis: the response objects, their input items, and the conversations that they form.

A response belongs to the API key that created it, identified by the key's name; other keys do not see it. It expires
`ttl_s` after its last use: when it was written, or when a later response continued its conversation. All responses
together take at most `max_bytes`. Beyond that, responses of the owner with the most bytes are removed, those first that
expire first. Several gateways may share a store, so every change is one script. Knows Redis and JSON objects; does not
know how a response is generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from gateway.dialects.responses.items import Item, response_of_item
from gateway.files.pagination import text
from gateway.store_keys import GatewayKeys
from scheduler.clock import Clock
from scheduler.store.durability import durable
from scheduler.store.scripts import load_script

NO_ROOM = -1  # an answer of the script `save`
RUNNING = ("queued", "in_progress")
_FIELDS = ("owner", "input", "output", "head", "lease_ms", "version")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it is stored. `lease_ms` is the time until which its generation is known to go on (Unix ms).

    `version` is the number of times that `replace` has changed it.
    """

    response: dict[str, Any]
    input: list[Item]
    lease_ms: int
    version: int = 0

    @property
    def is_running(self) -> bool:
        return self.response["status"] in RUNNING


@dataclass(frozen=True, slots=True)
class NoConversation:
    """The reason why a conversation cannot be read: a response is `missing` or `running`, or it is `too_long`."""

    reason: str
    response_id: str = ""


class NoRoom(Exception):
    """A response is not stored, because the store is full of responses that are being generated, or too small."""


class ResponseStore:
    """The store of all responses. It owns the keys `tidegate:response*` in Redis."""

    def __init__(self, redis: Redis, clock: Clock, ttl_s: float, max_bytes: int) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._clock = clock
        self.ttl_s = ttl_s
        self._max_bytes = max_bytes

        prelude = _prelude(self._keys)

        def load(name: str) -> AsyncScript:
            return load_script(redis, "gateway.jobs.responses", "drop", name, prelude=prelude)

        self._save, self._delete, self._renew = load("save"), load("delete"), load("renew")
        self._conversation = load("conversation")

    async def create(
        self, response: dict[str, Any], items: Sequence[Item], owner: str | None, lease_ms: int = 0
    ) -> None:
        """Store a new response with its input `items`. Raises `NoRoom`.

        One with a lease is acknowledged before it has ended: then it is at the store's replicas, or `NotDurable` is
        raised.
        """
        fields = {
            "owner": owner or "",
            "previous": response["previous_response_id"] or "",
            "input": msgspec.json.encode(items),
            "lease_ms": lease_ms,
        }
        await self._write(response, "new", owner, fields)
        if lease_ms:
            await durable(self._redis, self._keys.response + response["id"], on_disk=False)

    async def update(self, response: dict[str, Any]) -> bool:
        """Replace a response that is queued or in progress. Return False if it is neither: it has ended, or is gone."""
        return await self._write(response, "running", None, {})

    async def replace(self, changed: StoredResponse, owner: str | None, max_bytes: int) -> bool:
        """Write `changed`, unless somebody else has changed the record since it was read. Return whether it was.

        Raises `NoRoom`, also if its items have more than `max_bytes`.
        """
        items = msgspec.json.encode(changed.input)
        if len(items) > max_bytes:
            raise NoRoom
        fields = {"input": items, "version": changed.version + 1}
        return await self._write(changed.response, str(changed.version), owner, fields)

    async def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """Return the response; None if `owner` has no such response."""
        found: list[Any] = await self._redis.hmget(self._keys.response + response_id, list(_FIELDS))
        own, items, output, head, lease_ms, version = found
        if own is None or text(own) != (owner or ""):
            return None
        response = msgspec.json.decode(head) | {"output": msgspec.json.decode(output)}
        return StoredResponse(response, msgspec.json.decode(items), int(lease_ms), int(version or 0))

    async def delete(self, response_id: str, owner: str | None) -> bool:
        """Remove a response. Return False if `owner` has no such response."""
        return bool(await self._delete(keys=[self._keys.response + response_id], args=[response_id, owner or ""]))

    async def conversation(self, response_id: str, owner: str | None, max_bytes: int) -> list[Item] | NoConversation:
        """Return all items of a conversation up to the end of the response `response_id`, the oldest first."""
        args: list[Any] = [response_id, owner or "", self._expires_ms(), max_bytes]
        outcome, *found = await self._conversation(keys=[], args=args)
        if text(outcome) != "ok":
            return NoConversation(text(outcome), *(text(value) for value in found))
        turns = [msgspec.json.decode(found[i]) + msgspec.json.decode(found[i + 1]) for i in range(0, len(found), 2)]
        return [item for turn in reversed(turns) for item in turn]

    async def items(
        self, item_ids: Sequence[str], owner: str | None, max_bytes: int
    ) -> dict[str, Item] | NoConversation:
        """Return the items of `owner` with these ids, by id. The responses to which they belong are kept for longer.

        Those responses are read one after the other, and may have `max_bytes` together.
        """
        responses = dict.fromkeys(r for item in item_ids if (r := response_of_item(item)) is not None)
        items: dict[str, Item] = {}
        for response_id in responses:
            record = self._keys.response + response_id
            if text(await self._redis.hget(record, "owner") or "") != (owner or ""):
                continue
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hmget(record, ["output", "input"])
            pipeline.pexpireat(record, self._expires_ms())
            pipeline.zadd(self._keys.responses_of + (owner or ""), {response_id: self._expires_ms()}, xx=True)
            parts = [part for part in (await pipeline.execute())[0] if part is not None]
            max_bytes -= sum(map(len, parts))
            if max_bytes < 0:
                return NoConversation("too_long")
            items |= {item["id"]: item for part in parts for item in msgspec.json.decode(part)}
        return {item: items[item] for item in item_ids if item in items}

    async def renew(self, response_ids: Sequence[str], lease_ms: int) -> set[str]:
        """Renew the leases of responses until `lease_ms`. Return the ids of those that were cancelled or removed."""
        return {text(gone) for gone in await self._renew(keys=[], args=[lease_ms, *response_ids])}

    async def _write(self, response: dict[str, Any], guard: str, owner: str | None, fields: dict[str, Any]) -> bool:
        head = {name: value for name, value in response.items() if name != "output"}
        fields = fields | {
            "status": response["status"],
            "output": msgspec.json.encode(response["output"]),
            "head": msgspec.json.encode(head),
        }
        times = (self._clock.wall_ms(), self._expires_ms())
        args: list[Any] = [response["id"], owner or "", guard, *times, self._max_bytes]
        args += [part for pair in fields.items() for part in pair]
        written = await self._save(keys=[self._keys.response + response["id"]], args=args)
        if written == NO_ROOM:
            raise NoRoom
        return bool(written)

    def _expires_ms(self) -> int:
        return self._clock.wall_ms() + int(self.ttl_s * 1000)


def _prelude(keys: GatewayKeys) -> str:
    names = {"RECORD": keys.response, "EVENTS": keys.response_events, "OF": keys.responses_of}
    names |= {"SIZES": keys.responses_sizes, "BYTES": keys.responses_bytes}
    return "".join(f"local {name} = '{key}'\n" for name, key in names.items())
