"""Lists in order of creation, which are read page by page. The last id of a page is the cursor for the next page.

An index is a sorted set of ids in Redis. The scores are positions from one counter, so objects that were created in the
same second keep their order. Knows Redis and ids; does not know which objects the ids belong to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis

from gateway.store_keys import tombstone

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: Sequence[T]
    has_more: bool

    def to_json(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the OpenAI list object. `data` holds the items as JSON objects, each with an `id`."""
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": self.has_more}


async def position_of(redis: Redis, index: str, member: str) -> float | None:
    """Return the position of `member` in `index`; None if it is unknown. Recently deleted members are still known."""
    score = await redis.zscore(index, member)
    if score is not None:
        return float(score)
    left = await redis.get(tombstone(index, member))
    return float(left) if left is not None else None


async def page_of_ids(redis: Redis, index: str, *, after: float | None, limit: int, newest_first: bool) -> Page[str]:
    """Return up to `limit` members of `index` that follow the position `after` (None: from the start)."""
    if newest_first:
        start = "+inf" if after is None else f"({after!r}"
        found = await redis.zrange(index, start, "-inf", desc=True, byscore=True, offset=0, num=limit + 1)
    else:
        start = "-inf" if after is None else f"({after!r}"
        found = await redis.zrange(index, start, "+inf", byscore=True, offset=0, num=limit + 1)
    ids = [text(member) for member in found]
    return Page(ids[:limit], has_more=len(ids) > limit)


def text(value: Any) -> str:
    """Return a Redis reply as text. The reply is bytes, or already text if the client decodes replies."""
    return value.decode() if isinstance(value, bytes) else str(value)
