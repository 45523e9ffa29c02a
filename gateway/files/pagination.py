"""Lists in order of arrival, read a page at a time with the last id as the cursor.

An index is a sorted set of ids whose scores are positions drawn from one counter, so that two objects made in
the same second keep their order. Knows Redis and ids; does not know what the ids name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from redis.asyncio import Redis

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: Sequence[T]
    has_more: bool

    def to_json(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """The OpenAI list object; `data` are the items as JSON objects with an `id`."""
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": self.has_more}


def index_of(index: str, owner: str | None) -> str:
    """The part of `index` that belongs to `owner`; None owns what is made while access is open."""
    return index if owner is None else f"{index}:of:{quote(owner, safe='')}"


def tombstone_key(index: str, member: str) -> str:
    """Where a deleted member's position is kept for a while, so that a client which deletes what it lists can
    go on to the next page."""
    return f"{index}:was_at:{member}"


async def position_of(redis: Redis, index: str, member: str) -> float | None:
    """Where `member` is in `index`, or was until it was deleted. None: never heard of it."""
    score = await redis.zscore(index, member)
    if score is not None:
        return float(score)
    left = await redis.get(tombstone_key(index, member))
    return float(left) if left is not None else None


async def page_of_ids(redis: Redis, index: str, *, after: float | None, limit: int, newest_first: bool) -> Page[str]:
    """Up to `limit` members of `index` beyond the position `after`."""
    if newest_first:
        start = "+inf" if after is None else f"({after!r}"
        found = await redis.zrange(index, start, "-inf", desc=True, byscore=True, offset=0, num=limit + 1)
    else:
        start = "-inf" if after is None else f"({after!r}"
        found = await redis.zrange(index, start, "+inf", byscore=True, offset=0, num=limit + 1)
    ids = [text(member) for member in found]
    return Page(ids[:limit], has_more=len(ids) > limit)


def text(value: Any) -> str:
    """A Redis string, however the client was told to answer."""
    return value.decode() if isinstance(value, bytes) else str(value)
