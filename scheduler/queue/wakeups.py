"""What a worker has heard from its queue since it last asked: "there is work" and "this was cancelled".

Filled by a queue implementation, read by the loop through the queue's `wait_for_work` and `cancelled`. Does
not know how the news travels.
"""

import asyncio

from scheduler.clock import Clock


class Announcements:
    """One per queue handle, for one waiting task."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._news = asyncio.Event()
        self._cancelled: list[str] = []

    def wake(self) -> None:
        self._news.set()

    def cancel(self, request_id: str) -> None:
        self._cancelled.append(request_id)
        self._news.set()

    def take_cancelled(self) -> list[str]:
        taken, self._cancelled = self._cancelled, []
        return taken

    async def wait(self, timeout_s: float) -> bool:
        """True when there was news since the last True; False after `timeout_s` on the clock without any.
        The timeout is the clock's, not the event loop's, so that it also works in simulated time."""
        if not self._news.is_set() and timeout_s > 0:
            news = asyncio.ensure_future(self._news.wait())
            timer = asyncio.ensure_future(self._clock.sleep(timeout_s))
            try:
                await asyncio.wait({news, timer}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
                timer.cancel()
        heard = self._news.is_set()
        self._news.clear()
        return heard
