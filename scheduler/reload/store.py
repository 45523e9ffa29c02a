"""The tiers shared through the store: the document in force, the proposed document, and the followers.

Knows Redis, and documents as plain data; does not know whether a document is valid, or what it is used for. All present
followers have agreed to the document in force.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import structlog
from redis.asyncio import Redis

from scheduler.store import connection, keys
from scheduler.store.errors import UNREADABLE
from scheduler.store.scripts import load_script

log = structlog.get_logger()

T = TypeVar("T")

UNKNOWN = -1  # the generation that a part uses whose report cannot be read


@dataclass(frozen=True, slots=True)
class TierDocument:
    """A version of the tiers as stored.

    `content` is the input of `parse_tiers`. `source` describes its origin for people. `set_ms` is the time of the
    proposal. `file` is the digest of the tiers file that was put in force last: a change over HTTP keeps it.
    """

    generation: int
    content: dict[str, Any]
    source: str
    set_ms: int
    file: str = ""


@dataclass(frozen=True, slots=True)
class Follower:
    """The report of one gateway or worker: the tiers that it uses, and its last vote."""

    part: str  # name of the process
    generation: int = 0  # generation of the document that it uses
    looked_at: int = 0  # generation of the last proposal that it has voted on
    objection: str = ""  # its objection to that proposal; empty: no objection


@dataclass(frozen=True, slots=True)
class Reading:
    in_force: TierDocument | None
    proposed: TierDocument | None


class TierStore:
    def __init__(self, client: Redis) -> None:
        self._client = client
        self._keys = keys.Keys.of(client)
        self._settle = load_script(client, "scheduler.reload", "settle")
        self._encoder = msgspec.msgpack.Encoder()
        self._documents = msgspec.msgpack.Decoder(TierDocument)
        self._followers = msgspec.msgpack.Decoder(Follower)
        self._unreadable: set[str] = set()  # what could not be read at the last read

    async def read(self) -> Reading:
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hget(self._keys.tiers, "in_force")
        pipeline.get(self._keys.tiers_proposed)
        in_force, proposed = await pipeline.execute()
        documents = self._documents
        return Reading(
            self._decode(documents, in_force, "the tiers in force"),
            self._decode(documents, proposed, "the proposed tiers"),
        )

    async def propose(self, content: dict[str, Any], source: str, now_ms: int, file: str = "") -> TierDocument | None:
        """Propose a document and return it; None while another document is being voted on."""
        generation = await self._client.hincrby(self._keys.tiers, "generation", 1)
        document = TierDocument(generation, content, source, now_ms, file)
        data, ttl_ms = self._encoder.encode(document), int(keys.TIERS_PROPOSED_TTL_S * 1000)
        # If the reply to the first SET was lost, the repeated SET fails because of the first one. The value is then
        # this document.
        is_set = await self._client.set(self._keys.tiers_proposed, data, nx=True, px=ttl_ms)
        if not is_set and await self._client.get(self._keys.tiers_proposed) != data:
            return None
        await self._client.publish(self._keys.tiers_news, b"")
        return document

    async def commit(self, document: TierDocument) -> bool:
        """Put the proposed `document` in force. Return False if it is no longer the proposal."""
        return await self._end_proposal(document, commit=True)

    async def withdraw(self, document: TierDocument) -> None:
        await self._end_proposal(document, commit=False)

    async def _end_proposal(self, document: TierDocument, *, commit: bool) -> bool:
        data = self._encoder.encode(document)
        return bool(
            await self._settle(
                keys=[self._keys.tiers, self._keys.tiers_proposed], args=[data, int(commit), self._keys.tiers_news]
            )
        )

    async def report(self, follower: Follower) -> None:
        """Report that a part is alive, which tiers it uses and how it has voted.

        The report expires after `FOLLOWER_TTL_S`.
        """
        ttl_ms = int(keys.FOLLOWER_TTL_S * 1000)
        pipeline = self._client.pipeline(transaction=True)
        pipeline.set(self._keys.follower + follower.part, self._encoder.encode(follower), px=ttl_ms)
        pipeline.sadd(self._keys.followers, follower.part)
        await pipeline.execute()

    async def leave(self, part: str) -> None:
        pipeline = self._client.pipeline(transaction=True)
        pipeline.delete(self._keys.follower + part)
        pipeline.srem(self._keys.followers, part)
        await pipeline.execute()

    async def followers(self) -> list[Follower]:
        """Return the live followers, sorted by name. Names whose key has expired are removed from the set.

        A follower whose report cannot be read has voted on nothing that this version knows of.
        """
        members: set[bytes] = await self._client.smembers(self._keys.followers)  # type: ignore[assignment]  # not decoded
        parts = sorted(member.decode() for member in members)
        if not parts:
            return []
        reports: list[Any] = await self._client.mget([self._keys.follower + part for part in parts])
        gone = [part for part, report in zip(parts, reports, strict=True) if report is None]
        if gone:
            await self._client.srem(self._keys.followers, *gone)
        found = {part: report for part, report in zip(parts, reports, strict=True) if report is not None}
        return [
            self._decode(self._followers, report, f"the report of {part}") or Follower(part, UNKNOWN)
            for part, report in found.items()
        ]

    async def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` whenever there may be something new to read, also after each reconnect.

        Runs until cancelled.
        """
        async for _ in connection.messages(self._client, self._keys.tiers_news):
            on_news()

    def _decode(self, decoder: msgspec.msgpack.Decoder[T], data: bytes | None, what: str) -> T | None:
        """Return what `data` holds; None if there is none, or none that can be read: this is logged once."""
        was_unreadable = what in self._unreadable
        self._unreadable.discard(what)
        try:
            return None if data is None else decoder.decode(data)
        except UNREADABLE as error:
            self._unreadable.add(what)
            if not was_unreadable:
                log.error("a record of tiers cannot be read; it is left out", record=what, reason=str(error))
            return None
