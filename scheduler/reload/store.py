"""The tiers that a store's gateways and workers share: the document in force, the one proposed, and who follows.

Knows Redis and documents as plain data; does not know whether one is any good, nor what is done with it
(`tier_control` does). A document in force has been agreed to by all who followed at that moment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from scheduler.store import connection, keys

RESUBSCRIBE_S = 10.0  # of silence: a connection that broke without a word is silent, too

# Ends the proposal ARGV[1] if it is still that one: ARGV[2] 1 puts it in force. 1: it is in force now.
_SETTLE = f"""\
if redis.call('GET', KEYS[2]) == ARGV[1] then
  if ARGV[2] == '1' then redis.call('HSET', KEYS[1], 'in_force', ARGV[1]) end
  redis.call('DEL', KEYS[2])
  redis.call('PUBLISH', '{keys.TIERS_NEWS}', '')
end
return redis.call('HGET', KEYS[1], 'in_force') == ARGV[1] and 1 or 0
"""


@dataclass(frozen=True, slots=True)
class TierDocument:
    """`content` is what `parse_tiers` takes; `source` says where it came from, in words."""

    generation: int
    content: dict[str, Any]
    source: str
    set_ms: int


@dataclass(frozen=True, slots=True)
class Follower:
    """One gateway or worker: which generation it has in force, which proposal it has looked at last, and what it
    has against that one (empty: nothing)."""

    part: str
    generation: int = 0
    looked_at: int = 0
    objection: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    in_force: TierDocument | None
    proposed: TierDocument | None


class TierStore:
    def __init__(self, client: Redis) -> None:
        self._client = client
        self._settle = client.register_script(_SETTLE)
        self._encoder = msgspec.msgpack.Encoder()
        self._documents = msgspec.msgpack.Decoder(TierDocument)
        self._followers = msgspec.msgpack.Decoder(Follower)

    async def read(self) -> Reading:
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hget(keys.TIERS, "in_force")
        pipeline.get(keys.TIERS_PROPOSED)
        in_force, proposed = await pipeline.execute()
        return Reading(self._document(in_force), self._document(proposed))

    async def propose(self, content: dict[str, Any], source: str, now_ms: int) -> TierDocument | None:
        """The new document; None while another one is being decided on."""
        generation = await self._client.hincrby(keys.TIERS, "generation", 1)
        document = TierDocument(generation, content, source, now_ms)
        data, ttl_ms = self._encoder.encode(document), int(keys.TIERS_PROPOSED_TTL_S * 1000)
        # Sent a second time, when the first answer was lost, it finds the proposal taken: by itself.
        is_set = await self._client.set(keys.TIERS_PROPOSED, data, nx=True, px=ttl_ms)
        if not is_set and await self._client.get(keys.TIERS_PROPOSED) != data:
            return None
        await self._client.publish(keys.TIERS_NEWS, b"")
        return document

    async def commit(self, document: TierDocument) -> bool:
        """Put the proposed `document` in force; False where it is not the proposal any more."""
        return await self._end_proposal(document, commit=True)

    async def withdraw(self, document: TierDocument) -> None:
        await self._end_proposal(document, commit=False)

    async def _end_proposal(self, document: TierDocument, *, commit: bool) -> bool:
        data = self._encoder.encode(document)
        return bool(await self._settle(keys=[keys.TIERS, keys.TIERS_PROPOSED], args=[data, int(commit)]))

    async def report(self, follower: Follower) -> None:
        """I am there; within `FOLLOWER_TTL_S` again."""
        ttl_ms = int(keys.FOLLOWER_TTL_S * 1000)
        pipeline = self._client.pipeline(transaction=True)
        pipeline.set(keys.follower(follower.part), self._encoder.encode(follower), px=ttl_ms)
        pipeline.sadd(keys.FOLLOWERS, follower.part)
        await pipeline.execute()

    async def leave(self, part: str) -> None:
        pipeline = self._client.pipeline(transaction=True)
        pipeline.delete(keys.follower(part))
        pipeline.srem(keys.FOLLOWERS, part)
        await pipeline.execute()

    async def followers(self) -> list[Follower]:
        """Those alive, by name. Names whose key has expired leave the set."""
        members: set[bytes] = await self._client.smembers(keys.FOLLOWERS)  # type: ignore[assignment]  # not decoded
        parts = sorted(member.decode() for member in members)
        if not parts:
            return []
        reports: list[Any] = await self._client.mget([keys.follower(part) for part in parts])
        gone = [part for part, report in zip(parts, reports, strict=True) if report is None]
        if gone:
            await self._client.srem(keys.FOLLOWERS, *gone)
        return [self._followers.decode(report) for report in reports if report is not None]

    async def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` when there may be something new to read, until cancelled: also after each reconnect."""
        client = connection.blocking(self._client, RESUBSCRIBE_S)
        try:
            while True:
                await _listen_until_silent(client.pubsub(), on_news)
        finally:
            await client.aclose()

    def _document(self, data: bytes | None) -> TierDocument | None:
        return None if data is None else self._documents.decode(data)


async def _listen_until_silent(pubsub: PubSub, on_news: Callable[[], None]) -> None:
    try:
        await pubsub.subscribe(keys.TIERS_NEWS)
        while await pubsub.get_message(timeout=RESUBSCRIBE_S) is not None:
            on_news()
    finally:
        await pubsub.aclose()  # type: ignore[no-untyped-call]
