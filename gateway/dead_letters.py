"""Dead letters: requests that were given up, because their workers died or could not read them.

An operator lists, retries or removes them. The list is shared by all gateways, in Redis, and bounded in number and age.
It holds no prompts: a line of a batch is read again from the batch's input file. Does not know HTTP, or why a request
was given up.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis

from gateway.store_keys import DEAD_LETTER_S, GatewayKeys
from scheduler.store.errors import STORE_AWAY

log = structlog.get_logger(__name__)

MAX_DEAD_LETTERS = 1000  # beyond it, the oldest is removed


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up. `id` is the id in the answer's header `x-request-id`, or in a batch's error file."""

    id: str
    tier: str
    attempts: int
    reason: str
    at_ms: int
    owner: str | None = None  # name of the caller's API key; None: access is open
    batch_id: str | None = None  # None: the request was no line of a batch
    custom_id: str | None = None
    line: int | None = None  # line number in the batch's input, from 1


class DeadLetters:
    """The dead letters in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._decoder = msgspec.json.Decoder(DeadLetter)

    async def add(self, letter: DeadLetter) -> None:
        """Add a dead letter. While the store takes no writes, it is only logged: the request must fail all the same."""
        log.error("a request was given up", request=letter.id, tier=letter.tier, reason=letter.reason)
        with suppress(*STORE_AWAY):
            await self._write(letter)
            await self._remove_old(letter.at_ms)

    async def assign(self, letter_id: str, batch_id: str, custom_id: str, line: int) -> None:
        """Record that a dead letter is a line of a batch."""
        with suppress(*STORE_AWAY):
            letter = await self.get(letter_id)
            if letter is not None:
                await self._write(replace(letter, batch_id=batch_id, custom_id=custom_id, line=line))

    async def get(self, letter_id: str) -> DeadLetter | None:
        return (await self._load([letter_id]))[0]

    async def page(self, limit: int, after: str | None = None) -> list[DeadLetter] | None:
        """Return dead letters, the newest first, that follow the dead letter `after`; None if there is no such one."""
        rank: Any = -1 if after is None else await self._redis.zrevrank(self._keys.dead_letters, after)
        if rank is None:
            return None
        ids: list[Any] = await self._redis.zrange(self._keys.dead_letters, rank + 1, rank + limit, desc=True)
        return [letter for letter in await self._load([i.decode() for i in ids]) if letter is not None]

    async def remove(self, letter_id: str) -> bool:
        """Remove a dead letter. Return False if there is none."""
        return await self._remove([letter_id]) == 1

    async def count(self, now_ms: int) -> int:
        return int(await self._redis.zcount(self._keys.dead_letters, now_ms - 1000 * DEAD_LETTER_S, "+inf"))

    async def _write(self, letter: DeadLetter) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.set(self._keys.dead_letter + letter.id, msgspec.json.encode(letter), ex=DEAD_LETTER_S)
        pipeline.zadd(self._keys.dead_letters, {letter.id: letter.at_ms})
        pipeline.expire(self._keys.dead_letters, DEAD_LETTER_S)
        await pipeline.execute()

    async def _remove_old(self, now_ms: int) -> None:
        last_ms = now_ms - 1000 * DEAD_LETTER_S
        expired: list[Any] = await self._redis.zrange(self._keys.dead_letters, "-inf", last_ms, byscore=True)
        too_many: list[Any] = await self._redis.zrange(self._keys.dead_letters, 0, -MAX_DEAD_LETTERS - 1)
        await self._remove([i.decode() for i in {*expired, *too_many}])

    async def _remove(self, letter_ids: Sequence[str]) -> int:
        if not letter_ids:
            return 0
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.delete(*(self._keys.dead_letter + letter_id for letter_id in letter_ids))
        pipeline.zrem(self._keys.dead_letters, *letter_ids)
        return int((await pipeline.execute())[0])

    async def _load(self, letter_ids: Sequence[str]) -> list[DeadLetter | None]:
        found = await self._redis.mget([self._keys.dead_letter + i for i in letter_ids]) if letter_ids else []
        return [None if text is None else self._decoder.decode(text) for text in found]
