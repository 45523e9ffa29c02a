"""Tells clients that wait for a task that it has ended: one subscription for all of them.

A message may be lost while the subscription is renewed. When a new subscription is confirmed, all clients are therefore
woken, and look into the store.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator

from redis.asyncio import Redis

from scheduler.store import connection, keys


class TaskEnds:
    def __init__(self, client: Redis) -> None:
        self._client = client
        self._news = keys.Keys.of(client).tasks.news
        self._watched: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._listener: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watch(self, task_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set when the task ends. The first call opens the subscription."""
        if self._listener is None or self._listener.done():
            self._listener = asyncio.create_task(self._listen(), name="task-ends")
        event = asyncio.Event()
        self._watched[task_id].add(event)
        try:
            yield event
        finally:
            self._watched[task_id].discard(event)
            if not self._watched[task_id]:
                del self._watched[task_id]

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener

    async def _listen(self) -> None:
        async for message in connection.messages(self._client, self._news):
            is_ending = message["type"] == "message"
            ids = message["data"].decode().split() if is_ending else list(self._watched)
            for task_id in ids:
                for event in self._watched.get(task_id, ()):
                    event.set()
