"""A timer on the running event loop: the end of a wait can be moved during the wait.

Times are those of the loop's clock, which may be real or virtual. Knows the loop's clock and timers; does not know what
the wait is for.
"""

import asyncio


class LoopTimer:
    """A timer for one wait at a time."""

    def __init__(self) -> None:
        self._alarm: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[None] | None = None

    def now(self) -> float:
        """Return the loop's time in seconds."""
        return asyncio.get_running_loop().time()

    async def wait_until(self, when_s: float) -> None:
        """Wait until the loop's time is `when_s`, or the time set by `move`.

        Raises `RuntimeError` if another wait is running.
        """
        if self._done is not None:
            raise RuntimeError("another wait is going on already")
        self._done = asyncio.get_running_loop().create_future()
        self._start(when_s)
        try:
            await self._done
        finally:
            self._cancel()
            self._done = None

    def move(self, when_s: float) -> None:
        """Move the end of the present wait to `when_s`; without a wait, do nothing."""
        if self._done is not None:
            self._cancel()
            self._start(when_s)

    def _start(self, when_s: float) -> None:
        self._alarm = asyncio.get_running_loop().call_at(when_s, self._finish)

    def _cancel(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
