"""The search for the solo goodput: the highest load of interactive traffic alone that is served within its SLOs. Pure.

The search takes few probes and bounded time. Knows loads and how many of their requests were in time; does not know how
a load is sent.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.isolation.attainment import GOAL

MAX_DOUBLINGS = 6  # doublings (or halvings) of the first load: up to 64 times as much
BISECTIONS = 3  # bisections between a load and its double: the result is exact to about a tenth
Z_95 = 1.645  # 95 % quantile of the normal distribution, for a one-sided bound


def allowed_misses(offered: int) -> float:
    """Return the largest number of misses with which a load holds, out of `offered` requests.

    One miss is always allowed: even if exactly 99 % of requests are in time, one in three probes of 40 requests has a
    miss.
    """
    return max(1.0, (1 - GOAL) * offered)


@dataclass(frozen=True, slots=True)
class Probe:
    """One load that was tried, and how many of its requests missed their SLO.

    `clients` is the load in multiples of the scenario's load. If `was_cut`, the probe was ended early, because it had
    more misses than allowed. Then `offered` counts all planned requests, and `missed` is a lower bound.
    """

    clients: float
    offered: int
    missed: int
    was_cut: bool = False

    @property
    def attainment(self) -> float:
        """The share of requests that met their SLO; 1 if there were no requests."""
        return 1 - self.missed / self.offered if self.offered else 1.0

    @property
    def holds(self) -> bool:
        return self.missed <= allowed_misses(self.offered)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of the search, in multiples of the scenario's load.

    `clients` is the highest load that held; 0 if no load held. `breaks_at` is the lowest load above it that did not
    hold; None if no such load was tried.
    """

    clients: float
    probes: tuple[Probe, ...]
    breaks_at: float | None = None

    @property
    def at_least(self) -> float | None:
        """The lower bound of the attainment at `clients`, with 95 % confidence (Wilson's bound).

        The bound depends on the number of requests in the probe. None if no probe at this load had requests.
        """
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
    """Search for the highest load that holds. `measure` runs a probe of one load.

    Loads are multiples of the scenario's load. If the first load (1, or `least` if that is higher) holds, it is doubled
    until a load does not hold; otherwise it is halved until a load holds. Then the search bisects between the highest
    load that held and the lowest that did not, in equal ratios. No load below `least` is tried, since a probe would see
    too few requests. The search ends early when `has_time` returns False.
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
