"""The experiments: the load of each experiment, how the load changes, and which arms are compared. Pure.

Loads are multiples of the solo goodput: the highest load at which interactive traffic alone keeps its SLOs.
"""

from dataclasses import dataclass
from typing import Literal

from bench.isolation.arms import (
    AIMD,
    BEST_EFFORT,
    BULK_ALONE,
    BULK_SHIPPED,
    FIRST_COME,
    OURS,
    OURS_ALONE,
    STRICT,
    UNLIMITED,
)
from loadtest.traffic.scenario import Scenario, TrafficClass
from loadtest.traffic.scenario_arrivals import OpenLoop, Spike

ExperimentName = Literal["isolation", "overload", "deadlines", "frontier"]
OVERLOAD_S = 60.0  # seconds of overload for which the goal is stated


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """The load during a part of the run.

    The load is `base_load`, a multiple of the solo goodput. When the share `from_share` of the part's time has
    passed, the load is multiplied by `factor` for `for_s` seconds (None: until the end of the part).
    """

    base_load: float
    factor: float = 1.0
    from_share: float = 0.0
    for_s: float | None = None

    def spike(self, part_s: float) -> Spike | None:
        if self.factor == 1.0:
            return None
        at_s = self.from_share * part_s
        left_s = part_s - at_s
        return Spike(at_s=at_s, for_s=left_s if self.for_s is None else min(left_s, self.for_s), factor=self.factor)


@dataclass(frozen=True, slots=True)
class Experiment:
    name: ExperimentName
    title: str
    scenario: str  # name of the default scenario
    arms: tuple[str, ...]
    profile: LoadProfile
    is_steady: bool  # the scenario's own waves and bursts are left out, so that only `profile` changes the load
    has_premium: bool = False  # `priority` requests have a separate tier above the default tier
    has_own_load: bool = False  # the scenario's load is the unit of load; the solo goodput is not searched for


EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        Experiment(
            "isolation",
            "Interactive traffic beside a bulk backlog without end",
            "w1-chat",
            (OURS_ALONE, BULK_ALONE, FIRST_COME, STRICT, AIMD, OURS),
            LoadProfile(0.5),
            is_steady=False,
        ),
        Experiment(
            "overload",
            "Three classes: interactive traffic that triples for a minute, and bulk",
            "w3-square",
            (FIRST_COME, STRICT, OURS),
            LoadProfile(0.5, 3.0, 1 / 6, OVERLOAD_S),
            is_steady=True,
            has_premium=True,
        ),
        Experiment(
            "deadlines",
            "Jobs that must be done in time, in the tier of a bulk backlog, beside interactive traffic",
            "deadlines",
            (BEST_EFFORT, OURS),
            LoadProfile(0.4),
            is_steady=True,
        ),
        Experiment(
            "frontier",
            "Bulk harvest against the slowdown of interactive traffic",
            "peers",
            (OURS_ALONE, BULK_ALONE, BULK_SHIPPED, OURS, "S1.1", "S1.25", "S1.5", "S2", "S4", UNLIMITED),
            LoadProfile(1.0),
            is_steady=False,
            has_own_load=True,
        ),
    )
}


def with_load_profile(
    scenario: Scenario, experiment: Experiment, goodput_clients: float, load: float, part_s: float
) -> Scenario:
    """Return the scenario with its interactive classes at `load` times the solo goodput, changed by the load profile.

    `goodput_clients` is the solo goodput in multiples of the scenario's load. Jobs with deadlines are scaled too, since
    a faster machine can finish more of them in time.
    """
    spike = experiment.profile.spike(part_s)
    classes = dict(scenario.classes)
    for traffic in scenario.classes.values():
        arrivals = traffic.arrivals
        if not isinstance(arrivals, OpenLoop) or not (traffic.role == "interactive" or has_deadline(traffic)):
            continue
        arrivals = (arrivals.steady() if experiment.is_steady else arrivals).scaled(goodput_clients * load)
        if spike is not None:
            arrivals = arrivals.model_copy(update={"spikes": (spike,)})
        classes[traffic.name] = traffic.model_copy(update={"arrivals": arrivals})
    return scenario.model_copy(update={"classes": classes})


def has_deadline(traffic: TrafficClass) -> bool:
    """Return whether the class consists of jobs: bulk requests with a deadline."""
    return traffic.role == "bulk" and traffic.targets.e2e_ms is not None
