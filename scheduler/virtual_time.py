"""Virtual time for asyncio: when no task is ready, the clock jumps to the next timer instead of sleeping.

An hour of virtual time takes about a minute. The step loop, the queue protocol and the controller of production run on
virtual time without changes. A program that waits for a socket or a thread would wait for ever in virtual time, so it
is stopped with `VirtualDeadlock`.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH_MS = 1_700_000_000_000  # Unix time at which the virtual wall clock starts


class VirtualDeadlock(Exception):
    """The error for a virtual loop in which no task is ready and no timer is set."""


class _JumpingSelector(selectors.BaseSelector):
    """A selector that advances the virtual clock (in whole microseconds) instead of sleeping."""

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
    """An asyncio event loop that runs in virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_us / 1e6


class VirtualClock:
    """A `Clock` that shows the time of the running `VirtualTimeLoop`."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_ms(self) -> int:
        return EPOCH_MS + int(self.now() * 1000)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time and return its result. Virtual time starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
