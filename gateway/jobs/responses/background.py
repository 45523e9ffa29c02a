"""The responses that this gateway generates in the background, each in a task of its own.

While a response is generated, its record has a lease. If the gateway dies, the lease ends, and every reader then sees
that the response has failed. Knows tasks and leases; does not know what a response is.
"""

import asyncio
import contextvars
from collections.abc import Coroutine

import structlog
from redis.exceptions import RedisError

from gateway.jobs.responses.store import ResponseStore
from scheduler.clock import Clock

log = structlog.get_logger(__name__)

LEASE_S = 15.0  # seconds without a renewal after which a response counts as lost
RENEW_S = 1.0  # seconds between two renewals, which also tell which responses were cancelled through another gateway


class BackgroundRuns:
    """The background tasks of one gateway. `drain_s` is how long `close` waits for responses to end by themselves."""

    def __init__(self, store: ResponseStore, clock: Clock, drain_s: float) -> None:
        self._store = store
        self._clock = clock
        self._drain_s = drain_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._renewing: asyncio.Task[None] | None = None

    def lease_ms(self) -> int:
        """Return the end of a lease that begins now, in Unix ms."""
        return self._clock.wall_ms() + int(LEASE_S * 1000)

    def launch(self, response_id: str, run: Coroutine[None, None, None]) -> None:
        # A new context, because log lines of the run must not name the request that created the response.
        task = asyncio.create_task(run, name=response_id, context=contextvars.Context())
        self._tasks[response_id] = task
        task.add_done_callback(self._on_end)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_leases())

    def cancel(self, response_id: str) -> None:
        """Stop a response. This has no effect if this gateway does not generate it."""
        if (task := self._tasks.get(response_id)) is not None:
            _cancel(task)

    async def close(self) -> None:
        """Wait for the responses to end, and stop those that take longer than `drain_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self._drain_s)
        running = [*self._tasks.values(), *([self._renewing] if self._renewing is not None else [])]
        for task in running:
            _cancel(task)
        await asyncio.gather(*running, return_exceptions=True)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task.get_name()]
        if not task.cancelled() and task.exception() is not None:
            log.error("a background response could not be stored", exc_info=task.exception())

    async def _renew_leases(self) -> None:
        while True:
            await self._clock.sleep(RENEW_S)
            try:
                gone = await self._store.renew(list(self._tasks), self.lease_ms()) if self._tasks else ()
            except RedisError as error:
                log.warning("leases of background responses were not renewed", error=str(error))
                continue
            for response_id in gone:
                self.cancel(response_id)


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel `task` after its first step. Before it, none of its code would run, and its request would stay open."""
    asyncio.get_running_loop().call_soon(task.cancel)
