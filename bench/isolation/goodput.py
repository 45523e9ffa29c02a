"""The search for the solo goodput: the highest load that is served within its promises, by few probes in bounded time.

Pure: knows loads and what share of their requests were in time; not how a load is sent.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.isolation.attainment import GOAL

MAX_DOUBLINGS = 6
BISECTIONS = 3
Z_95 = 1.645  # one-sided


def allowed_misses(offered: int) -> float:
    """Of so many requests. One is allowed of however few: at the very goal, every third probe of 40 has one."""
    return max(1.0, (1 - GOAL) * offered)


@dataclass(frozen=True, slots=True)
class Probe:
    """One load that was tried, in multiples of the scenario's. Where it `was_cut`, because more were late than may be,
    `missed` is the least that it could have come to, of what was planned."""

    clients: float
    offered: int
    missed: int
    was_cut: bool = False

    @property
    def attainment(self) -> float:
        """1 where nobody came: nobody was late."""
        return 1 - self.missed / self.offered if self.offered else 1.0

    @property
    def holds(self) -> bool:
        return self.missed <= allowed_misses(self.offered)


@dataclass(frozen=True, slots=True)
class Goodput:
    """`clients` is the most load that was tried and held; 0 where none did. `breaks_at`: the least above it that did
    not hold; None: none was tried."""

    clients: float
    probes: tuple[Probe, ...]
    breaks_at: float | None = None

    @property
    def at_least(self) -> float | None:
        """The attainment at `clients` that as many requests show with 95 % confidence (Wilson's bound)."""
        held = [p for p in self.probes if p.clients == self.clients and p.offered]
        if not held:
            return None
        share, offered = held[-1].attainment, held[-1].offered
        spread = Z_95 * math.sqrt(share * (1 - share) / offered + (Z_95 / (2 * offered)) ** 2)
        return (share + Z_95**2 / (2 * offered) - spread) / (1 + Z_95**2 / offered)


async def find_goodput(
    measure: Callable[[float], Awaitable[Probe]],
    *,
    least: float = 0.0,
    has_time: Callable[[], bool] = lambda: True,
) -> Goodput:
    """`measure` runs a load. Doubles (or halves, as far as `least`, below which a probe would see too little) until one
    holds and one does not, then bisects, in steps of equal ratio; ends early where `has_time` says no."""
    probes: list[Probe] = []

    async def holds(clients: float) -> bool:
        probes.append(await measure(clients))
        return probes[-1].holds

    clients = max(1.0, least)
    low, high = (clients, 0.0) if await holds(clients) else (0.0, clients)
    for _ in range(MAX_DOUBLINGS):
        clients = clients * 2.0 if low else clients / 2.0
        if (low and high) or clients < least or not has_time():
            break
        if await holds(clients):
            low = clients
        else:
            high = clients
    for _ in range(BISECTIONS if low and high else 0):
        if not has_time():
            break
        middle = math.sqrt(low * high)
        low, high = (middle, high) if await holds(middle) else (low, middle)
    return Goodput(low, tuple(probes), high or None)
