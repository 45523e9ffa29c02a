"""Wake-ups for a worker: "there is work" and "this request was cancelled", collected until the worker reads them.

A queue implementation adds wake-ups. The worker's loop reads them through the queue's `wait_for_work` and `cancelled`.
Does not know how the messages travel.
"""

import asyncio

from scheduler.clock import Clock


class Wakeups:
    """The wake-ups of one queue handle, for one waiting task."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._happened = asyncio.Event()
        self._cancelled: list[str] = []

    def wake(self) -> None:
        self._happened.set()

    def cancel(self, request_id: str) -> None:
        self._cancelled.append(request_id)
        self._happened.set()

    def pop_cancelled(self) -> list[str]:
        taken, self._cancelled = self._cancelled, []
        return taken

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next wake-up and return True. Return False after `timeout_s` seconds without a wake-up.

        A wake-up that has come since the last call counts too. The timeout uses the injected clock, not the event loop,
        so that it also works in simulated time.
        """
        if not self._happened.is_set() and timeout_s > 0:
            happened = asyncio.ensure_future(self._happened.wait())
            timer = asyncio.ensure_future(self._clock.sleep(timeout_s))
            try:
                await asyncio.wait({happened, timer}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                happened.cancel()
                timer.cancel()
        has_happened = self._happened.is_set()
        self._happened.clear()
        return has_happened
