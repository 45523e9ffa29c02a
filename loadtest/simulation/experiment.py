"""One experiment: turns options into settings and traffic, runs them, and summarises the run.

A search runs many experiments. This module connects the parts of the simulator: it knows where scenarios, traces, cards
and tiers come from; it does not know flags or text.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from loadtest.simulation.cost_card import CostCard
from loadtest.simulation.deployment import Scaling, Setting
from loadtest.simulation.observation import Observation
from loadtest.simulation.run import DRAIN_S, simulate
from loadtest.simulation.summary import Summary, summarize
from loadtest.simulation.traffic import TraceRow, Traffic, read_trace, scenario_traffic, trace_traffic
from loadtest.traffic.scenario import Role, load_scenario
from scheduler.config import TierSet, load_tiers, shipped_tiers_path

SHIPPED = ""  # this name means the shipped tiers.yaml
NEIGHBOUR_S = 20.0  # seconds for which a busy neighbour stays


@dataclass(frozen=True, slots=True)
class Experiment:
    """The options of one experiment.

    `rate` multiplies the number of clients in the scenario's interactive classes, or the whole load of a trace.
    `service_tier` is the tier that these classes ask for instead of their own. `drift` multiplies step times in the
    second half of the load. `neighbour` slows the engines down for `NEIGHBOUR_S` in the middle of the load, as other
    programs on the machine do: each step takes a random factor between 1 and this longer. With a `role`, only the
    scenario's classes of this role send requests.
    """

    tiers: TierSet
    card: CostCard
    duration_s: float
    scenario: str = ""
    bulk_pool: str = ""
    trace: "tuple[TraceRow, ...]" = ()
    workers: int = 1
    scaling: Scaling | None = None
    rate: float = 1.0
    seed: int = 1
    drain_s: float = DRAIN_S
    gather_s: float = 0.0
    drift: float = 1.0
    service_tier: str = ""
    neighbour: float = 1.0
    role: Role | None = None

    def run(self, show: Callable[[float], None] = lambda now_s: None) -> tuple[Summary, Observation]:
        """Simulate the load. `show` is told the virtual seconds since it began, once in each of them."""
        traffic = self.traffic()
        setting = Setting(
            tiers=self.tiers,
            card=self.card,
            workers=self.workers,
            scaling=self.scaling,
            seed=self.seed,
            prefix_cache=traffic.shares_prefixes,
            drift=self._slowdown() if (self.drift, self.neighbour) != (1.0, 1.0) else None,
        )
        observation = simulate(
            setting, traffic, self.duration_s, drain_s=self.drain_s, gather_s=self.gather_s, show=show
        )
        return summarize(observation, self.tiers), observation

    def traffic(self) -> Traffic:
        """Return the traffic of the load. Raises `ScenarioError` or `TrafficError`."""
        if self.trace:
            return trace_traffic(self.trace, self.tiers, self.duration_s, self.seed, self.rate)
        scenario = load_scenario(self.scenario, self.bulk_pool, needed=()).with_load_scaled(self.rate)
        if self.service_tier:
            scenario = scenario.with_service_tier(self.service_tier)
        if self.role is not None:
            scenario = scenario.model_copy(update={"classes": {c.name: c for c in scenario.with_role(self.role)}})
        scenario = scenario.with_lengths_scaled(scenario.scale_for(self.card.max_model_len))
        return scenario_traffic(scenario, self.tiers, self.duration_s, self.seed)

    def with_workers(self, workers: int) -> "Experiment":
        return replace(self, workers=workers, scaling=None)

    def with_rate(self, rate: float) -> "Experiment":
        return replace(self, rate=rate)

    def _slowdown(self) -> Callable[[float], float]:
        """Return the factor on the time of a step, as a function of its start."""
        rng = random.Random(self.seed)

        def slowdown(since_s: float) -> float:
            drift = self.drift if since_s >= self.duration_s / 2 else 1.0
            has_neighbour = abs(since_s - self.duration_s / 2) <= NEIGHBOUR_S / 2
            return drift * rng.uniform(1.0, self.neighbour) if has_neighbour else drift

        return slowdown


def read_whole_trace(path: Path) -> "tuple[TraceRow, ...]":
    """Return all rows of a trace. Raises `TraceError`."""
    return tuple(read_trace(path))


def find_tiers(name_or_path: str) -> TierSet:
    """Return the shipped tiers for an empty name, the simulator's tiers of this name, or the tiers in this file.

    Raises `TierConfigError`.
    """
    if name_or_path == SHIPPED:
        return load_tiers(shipped_tiers_path())
    own = Path(str(files("loadtest") / "simulation" / "tiers" / f"{name_or_path}.yaml"))
    return load_tiers(own if own.exists() else Path(name_or_path))
