"""Clocks. Policy gets `now` as an argument; only drivers hold a clock.

The product runs on `SystemClock`, the simulator on a virtual clock with the same three methods. Nothing else in the
scheduler calls `time.*` or `asyncio.sleep`.
"""

import asyncio
import time
from typing import Protocol

NEVER_S = float("inf")


class Clock(Protocol):
    def now(self) -> float:
        """Return monotonic seconds from an arbitrary origin, for durations."""
        ...

    def wall_ms(self) -> int:
        """Return Unix time in integer ms, which processes can compare: for deadlines and leases."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
