"""Cancels requests, also while the store is away or takes no writes: then they are cancelled when it is back."""

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from scheduler.queue.base import Queue
from scheduler.store.errors import STORE_AWAY, StoreRefused

log = structlog.get_logger()


class Cancellations:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._left: list[str] = []  # ids of requests that the store could not cancel yet
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusal: StoreRefused | None = None  # the store's answer to the last probe, if it takes no writes

    async def cancel(self, request_ids: Sequence[str]) -> None:
        try:
            await self._queue.cancel(request_ids)
        except STORE_AWAY:
            self._left += request_ids

    def cancel_later(self, request_ids: Sequence[str]) -> None:
        """Cancel requests in the background."""

        async def cancel() -> None:
            try:
                await self.cancel(request_ids)
            except Exception as error:
                log.warning("requests not withdrawn", error=str(error))

        task = asyncio.create_task(cancel())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def probe(self) -> None:
        """Learn whether the store takes writes, log a change, and cancel what is left."""
        try:
            await self._queue.probe()
        except StoreRefused as refusal:
            if self.refusal is None:
                log.warning("the store refuses writes", cause=refusal.cause)
            self.refusal = refusal
            return
        if self.refusal is not None:
            log.info("the store takes writes again")
        self.refusal = None
        if self._left:
            left, self._left = self._left, []
            await self.cancel(left)

    async def close(self, request_ids: Iterable[str]) -> None:
        """Cancel requests and everything that is left. Raises the store's error if it cannot."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._queue.cancel([*request_ids, *self._left])
