"""The search for the solo goodput: the highest load that is served within its SLOs, with few probes in bounded time.

Pure: knows loads and the share of their requests that were in time; not how a load is sent.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.isolation.attainment import GOAL

MAX_DOUBLINGS = 6  # up to 64 times the first load
BISECTIONS = 3  # a doubling cut three times: the result is within a tenth
Z_95 = 1.645  # one-sided


def allowed_misses(offered: int) -> float:
    """Return how many of the offered requests may miss their SLO.

    One miss is always allowed: at exactly the goal, every third probe of 40 requests has one.
    """
    return max(1.0, (1 - GOAL) * offered)


@dataclass(frozen=True, slots=True)
class Probe:
    """One load that was tried, in multiples of the scenario's load.

    A probe that `was_cut` had more misses than allowed; `missed` is then a lower bound, over all planned requests.
    """

    clients: float
    offered: int
    missed: int
    was_cut: bool = False

    @property
    def attainment(self) -> float:
        """The share of requests in time; 1 where there were no requests."""
        return 1 - self.missed / self.offered if self.offered else 1.0

    @property
    def holds(self) -> bool:
        return self.missed <= allowed_misses(self.offered)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of the search. `clients` is the highest load that was tried and held, 0 where none did; `breaks_at` is
    the lowest load above it that did not hold, None where none was tried."""

    clients: float
    probes: tuple[Probe, ...]
    breaks_at: float | None = None

    @property
    def at_least(self) -> float | None:
        """The attainment at `clients` that so many requests prove with 95 % confidence (Wilson's bound); None without
        probes."""
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
    """Search for the highest load that holds; `measure` runs one load.

    Doubles the load (or halves it, down to `least`, below which a probe would see too few requests) until one holds and
    one does not, then bisects in equal ratios. Ends early when `has_time` returns False.
    """
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
