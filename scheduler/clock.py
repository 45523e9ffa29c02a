"""The clock of the scheduler: the interface `Clock`, and `SystemClock` for production.

Code that decides something gets the time as the argument `now`. Only code that runs loops holds a clock. The simulator
uses a virtual clock with the same three methods (`scheduler.virtual_time`). No other module of the scheduler calls
`time.*` or `asyncio.sleep`.
"""

import asyncio
import time
from typing import Protocol

NEVER_S = float("inf")


class Clock(Protocol):
    def now(self) -> float:
        """Return the seconds since an arbitrary origin. The clock is monotonic: it serves to measure durations."""
        ...

    def wall_ms(self) -> int:
        """Return Unix time in whole ms. Different processes can compare it, so it is used for deadlines and leases."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
