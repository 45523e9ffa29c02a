"""Time as a collaborator. Policy gets `now` as an argument; only drivers hold a clock.

`SystemClock` is the product's. The simulator brings a virtual one with the same three verbs, so that nothing
in the scheduler ever calls `time.*` or `asyncio.sleep` itself.
"""

import asyncio
import time
from typing import Protocol

NEVER_S = float("inf")


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, monotonic, from an arbitrary origin: for durations."""
        ...

    def wall_ms(self) -> int:
        """Unix time in integer ms: comparable between processes, for deadlines and leases."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
