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


async def page_of_ids(
    redis: Redis, index: str, cursors: str, *, after: str | None, limit: int, newest_first: bool = True
) -> Page[str] | None:
    """Return up to `limit` members of `index` that follow the member `after` (None: from the start).

    `cursors` is the index that has `after`. Recently deleted members are still known there. Return None if it is
    unknown.
    """
    start = "+inf" if newest_first else "-inf"
    if after is not None:
        position = await redis.zscore(cursors, after) or await redis.get(tombstone(cursors, after))
        if position is None:
            return None
        start = f"({float(position)!r}"
    end = "-inf" if newest_first else "+inf"
    found = await redis.zrange(index, start, end, desc=newest_first, byscore=True, offset=0, num=limit + 1)
    ids = [text(member) for member in found]
    return Page(ids[:limit], has_more=len(ids) > limit)


def text(value: Any) -> str:
    """Return a Redis reply as text. The reply is bytes, or already text if the client decodes replies."""
    return value.decode() if isinstance(value, bytes) else str(value)
