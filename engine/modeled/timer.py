"""A wait on the running event loop whose end can be moved while it lasts, in real time or virtual, as the loop has it.

Knows the loop's clock and timers; not what is waited for.
"""

import asyncio


class LoopTimer:
    """One wait at a time."""

    def __init__(self) -> None:
        self._alarm: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] | None = None

    def now(self) -> float:
        """Seconds, as the loop counts them."""
        return asyncio.get_running_loop().time()

    async def wait_until(self, when_s: float) -> None:
        """Raises `RuntimeError` while somebody waits already."""
        if self._over is not None:
            raise RuntimeError("somebody waits already")
        self._over = asyncio.get_running_loop().create_future()
        self._set(when_s)
        try:
            await self._over
        finally:
            self._unset()
            self._over = None

    def move(self, when_s: float) -> None:
        """The wait that lasts ends then; without one nothing happens."""
        if self._over is not None:
            self._unset()
            self._set(when_s)

    def _set(self, when_s: float) -> None:
        self._alarm = asyncio.get_running_loop().call_at(when_s, self._ring)

    def _unset(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
