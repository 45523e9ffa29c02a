"""Short runs before the arms are measured, to find the solo goodput.

The solo goodput is the highest load of interactive traffic alone that is served within its SLOs. Its search takes few
probes and bounded time. The runs use the same server as the arms, but other requests. Knows which runs are needed; does
not know how requests are sent.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from bench.isolation.admin import Systems
from bench.isolation.arms import Arm
from bench.isolation.rounds import Part, Progress, run_part
from bench.isolation.slos import GOAL, Attainment, MissCount, attainment_of
from loadtest.client.runner import ArmRun, Timing
from loadtest.traffic.scenario import Scenario, Targets
from loadtest.traffic.scenario_arrivals import OpenLoop

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


TUNING_ROUND = 1000  # a round number that no arm uses, so that its requests differ
PROBE_REQUESTS = 40  # a probe is prolonged until it has about this number of requests
LONGEST_PROBE = 3.0  # longest duration of a prolonged probe ÷ its usual duration
LEAST_REQUESTS = 8  # a load is not tried if its longest probe would have fewer requests


@dataclass(frozen=True, slots=True)
class Trials:
    """Short runs of one scenario. Each run has the durations in `timing`."""

    systems: Systems
    scenario: Scenario
    slos: Mapping[str, Targets]  # the SLO of each interactive class
    timing: Timing
    seed: int
    progress: Progress

    async def search_goodput(self, arm: Arm, budget_s: float) -> Goodput:
        """Search for the solo goodput in multiples of the scenario's load.

        The probes send requests at a steady rate, without the scenario's waves and bursts. No probe starts after
        `budget_s` seconds. A probe ends as soon as it has more misses than allowed.
        """
        steady = _steady(self.scenario)
        rate_per_s = sum(
            c.arrivals.mean_rate_per_s for c in steady.with_role("interactive") if isinstance(c.arrivals, OpenLoop)
        )
        usual_s, longest_s = self.timing.duration_s, LONGEST_PROBE * self.timing.duration_s
        until_s = perf_counter() + budget_s

        async def measure(clients: float) -> Probe:
            probe_s = min(max(usual_s, PROBE_REQUESTS / (rate_per_s * clients)), longest_s)
            probe = await self._probe(arm, steady.with_load_scaled(clients), clients, probe_s)
            late = f"{probe.missed} of {probe.offered} late" + (", ended there" if probe.was_cut else "")
            verdict = "holds" if probe.holds else "does not hold"
            self.progress(f"{arm.title} at {clients:.3g} × the scenario's load: {verdict} ({late})")
            return probe

        least = LEAST_REQUESTS / (rate_per_s * longest_s)
        return await find_goodput(measure, least=least, has_time=lambda: perf_counter() < until_s)

    async def _probe(self, arm: Arm, loaded: Scenario, clients: float, probe_s: float) -> Probe:
        missed = MissCount(self.slos)

        def is_lost(run: ArmRun) -> bool:
            return missed.update(run, perf_counter()) > allowed_misses(run.planned)

        part = await self._run(arm, loaded, f"solo-{clients:.4g}-", probe_s, is_lost)
        run = part.run
        if run.was_cut:
            return Probe(clients, run.planned, missed.misses, was_cut=True)
        seen = self._interactive(part)
        return Probe(clients, seen.offered, seen.offered - seen.met)

    async def _run(
        self,
        arm: Arm,
        loaded: Scenario,
        salt: str,
        duration_s: float,
        should_stop: Callable[[ArmRun], bool] | None = None,
    ) -> Part:
        timing = replace(self.timing, duration_s=duration_s, rounds=1)
        return await run_part(self.systems, arm, loaded, timing, self.seed, TUNING_ROUND, salt, should_stop)

    def _interactive(self, part: Part) -> Attainment:
        total = Attainment(0, 0)
        for name, targets in self.slos.items():
            total += attainment_of(part.run.outcomes[name], targets)
        return total


def _steady(scenario: Scenario) -> Scenario:
    classes = {
        name: c.model_copy(update={"arrivals": c.arrivals.steady()}) if isinstance(c.arrivals, OpenLoop) else c
        for name, c in scenario.classes.items()
    }
    return scenario.model_copy(update={"classes": classes})
