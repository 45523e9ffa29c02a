"""The events of responses that are generated in the background, in Redis: one stream per response.

A client may follow the events through any gateway, leave, and come back later to the place where it left. Knows frames
and their sequence numbers; does not know their content.
"""

import asyncio
import builtins
from collections.abc import AsyncGenerator
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError, TimeoutError

from gateway.store_keys import EVENTS_KEPT_S, GatewayKeys
from scheduler.store import connection

WAIT_S = 5.0  # seconds for which a follower waits before it yields nothing
AWAY_S = 10.0  # seconds of the store's absence that followers outlast
READ_COUNT = 64  # entries per read; more would hold up the event loop for long
FRAME_END = b"\n\n"


class EventWriter:
    """The writer of the events of one response. `ttl_s` is the time for which the response is stored."""

    def __init__(self, redis: Redis, response_id: str, ttl_s: float) -> None:
        self._redis = redis
        self._ttl_ms = int(ttl_s * 1000)
        self._key = GatewayKeys.of(redis).response_events + response_id
        self._number = 0  # sequence number of the next event
        self._num_entries = 0

    async def write(self, frames: bytes, is_last: bool = False) -> None:
        """Append frames of events. No comments may be among them.

        Ids count the entries, so that followers see what comes after a failover to a server that has lost some, or
        whose clock is behind. An entry that is sent again, because no reply came, is refused.
        """
        entry = {b"number": self._number, b"frames": frames, b"last": int(is_last)}
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xadd(self._key, entry, id=f"{self._num_entries + 1}-0")  # type: ignore[arg-type]
        pipeline.pexpire(self._key, min(EVENTS_KEPT_S * 1000, self._ttl_ms) if is_last else self._ttl_ms)
        try:
            await pipeline.execute()
        except ResponseError as error:
            if "equal or smaller" not in str(error):
                raise
        self._num_entries += 1
        self._number += frames.count(FRAME_END)


async def follow(redis: Redis, response_id: str, after: int, waits: bool) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield the frames of the events with a sequence number greater than `after`, until the last event.

    Each item is the highest sequence number so far, and the new frames. The frames are empty after each `WAIT_S`
    without an event, and also at once if there is no event and `waits` is false. A follower that waits has a connection
    of its own. Raises the store's errors if it is away for longer than `AWAY_S`.
    """
    reader = connection.blocking(redis, WAIT_S) if waits else redis
    key = GatewayKeys.of(redis).response_events + response_id
    last_id: bytes | str = "0"
    block_ms = int(WAIT_S * 1000) if waits else None
    try:
        while True:
            try:
                async with asyncio.timeout(WAIT_S + AWAY_S):
                    reply: Any = await reader.xread({key: last_id}, count=READ_COUNT, block=block_ms)
            except builtins.TimeoutError:
                raise TimeoutError("The store does not answer.") from None
            is_last, new = False, list[bytes]()
            for entry_id, entry in reply[0][1] if reply else ():
                last_id, is_last = entry_id, is_last or entry[b"last"] == b"1"
                first, frames = int(entry[b"number"]), entry[b"frames"]
                new.append(_after(after, first, frames))
                after = max(after, first + frames.count(FRAME_END) - 1)
            if any(new) or not reply:
                yield after, b"".join(new)  # in one piece: each one takes its time to send
            if is_last:
                return
    finally:
        if reader is not redis:
            await reader.aclose()


def _after(after: int, first: int, frames: bytes) -> bytes:
    """Return the `frames` with a sequence number greater than `after`. The first one has the number `first`."""
    if first > after:
        return frames
    return b"".join(frame + FRAME_END for frame in frames.split(FRAME_END)[after + 1 - first : -1])
