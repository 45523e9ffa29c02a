"""Virtual time for asyncio: when nothing is ready, the clock jumps to the next timer. An hour takes about a minute.

The shipped step loop, queue protocol and controller run on it unchanged. A program that waits for a socket or a thread
would wait for ever here: `VirtualDeadlock` stops it.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH_MS = 1_700_000_000_000  # Unix time at which the virtual wall clock starts


class VirtualDeadlock(Exception):
    """No task is ready and no timer is set."""


class _JumpingSelector(selectors.BaseSelector):
    """Moves the clock (integer microseconds) where a real selector would sleep."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self.now_us = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlock("every task waits, and nothing will wake one: await only timers and other tasks")
        if timeout > 0:
            self.now_us += max(1, round(timeout * 1e6))
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_us / 1e6


class VirtualClock:
    """`Clock` on the running virtual loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_ms(self) -> int:
        return EPOCH_MS + int(self.now() * 1000)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time, which starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
