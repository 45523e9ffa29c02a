"""The SLO of each interactive class, and which requests met theirs. Pure.

The tiers are given this SLO, and the results are judged by it. Every share is over *offered* requests: a request that
was refused, failed or never ended is a miss. Knows the order of precedence (the command's flags, then the scenario,
then the tiers), outcomes and targets; does not know arms.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bench.isolation.arms import PREMIUM_SERVICE_TIERS, Document
from loadtest.client.answer import Outcome
from loadtest.client.runner import ArmRun
from loadtest.traffic.scenario import Scenario, Targets, TrafficClass
from scheduler.config import TierSet, parse_tiers

PREMIUM_SLO_SHARE = 0.6  # TTFT SLO of the top tier ÷ TTFT SLO of the default tier, if the scenario does not set one


def targets_of(traffic: TrafficClass, tiers: TierSet, slo: Targets) -> Targets:
    """Return the SLO of the class. Each target comes from the command, or else the scenario, or else the class's tier.

    `slo` holds the targets of the command. The target for the total time comes from the scenario only.
    """
    tier = tiers.for_service_tier(traffic.service_tier or "auto") or tiers[tiers.default_tier]
    own = traffic.targets
    return Targets(
        ttft_ms=slo.ttft_ms or own.ttft_ms or tier.slo.ttft_p99_ms,
        itl_ms=slo.itl_ms or own.itl_ms or tier.slo.itl_p99_ms,
        e2e_ms=own.e2e_ms,
    )


def premium_ttft_ms(scenario: Scenario, ours: Document, slo: Targets) -> float | None:
    """Return the TTFT SLO in ms of the tier above the default tier; None if no TTFT SLO is given anywhere.

    If the command has a TTFT SLO, the result is `PREMIUM_SLO_SHARE` times it. Otherwise, the result is the shortest
    TTFT target that the scenario has for a class of this tier. If there is none, the result is `PREMIUM_SLO_SHARE`
    times the TTFT SLO of the default tier.
    """
    if slo.ttft_ms is not None:
        return PREMIUM_SLO_SHARE * slo.ttft_ms
    own = [c.targets.ttft_ms for c in scenario.with_role("interactive") if is_premium(c)]
    if said := [ttft_ms for ttft_ms in own if ttft_ms is not None]:
        return min(said)
    tiers = parse_tiers(ours)
    base_ms = tiers[tiers.default_tier].slo.ttft_p99_ms
    return None if base_ms is None else PREMIUM_SLO_SHARE * base_ms


def slos_by_class(
    scenario: Scenario, tiers: TierSet, slo: Targets, premium_ttft_ms: float | None = None
) -> dict[str, Targets]:
    """Return the SLO of each interactive class.

    `premium_ttft_ms`, if given, is the TTFT SLO of the classes in the tier above the default tier.
    """
    slos = {c.name: targets_of(c, tiers, slo) for c in scenario.with_role("interactive")}
    if premium_ttft_ms is None:
        return slos
    top = [c.name for c in scenario.with_role("interactive") if is_premium(c)]
    return slos | {name: slos[name].model_copy(update={"ttft_ms": premium_ttft_ms}) for name in top}


def is_premium(traffic: TrafficClass) -> bool:
    return traffic.service_tier in PREMIUM_SERVICE_TIERS


GOAL = 0.99  # a load holds if at least this share of its requests meets the SLO
GAP_QUANTILE = 0.99  # the quantile of a request's gaps between tokens that its ITL target limits


def has_met(outcome: Outcome, targets: Targets) -> bool:
    """Return whether the request met its SLO.

    The answer must be complete, and its TTFT, the p99 of its gaps between tokens, and its total time must be within the
    targets.
    """
    if not outcome.is_complete or outcome.ttft_s is None or outcome.e2e_s is None:
        return False
    gaps = outcome.inter_token_s()
    gap_s = float(np.quantile(gaps, GAP_QUANTILE)) if gaps else 0.0
    held = ((targets.ttft_ms, outcome.ttft_s), (targets.itl_ms, gap_s), (targets.e2e_ms, outcome.e2e_s))
    return all(target_ms is None or seconds <= target_ms / 1000 for target_ms, seconds in held)


@dataclass(frozen=True, slots=True)
class Attainment:
    offered: int
    met: int

    @property
    def share(self) -> float | None:
        return self.met / self.offered if self.offered else None

    def __add__(self, other: "Attainment") -> "Attainment":
        return Attainment(self.offered + other.offered, self.met + other.met)


def attainment_of(outcomes: Iterable[Outcome], targets: Targets) -> Attainment:
    verdicts = [has_met(outcome, targets) for outcome in outcomes]
    return Attainment(len(verdicts), sum(verdicts))


class MissCount:
    """A count, while an arm runs, of the requests that have certainly missed their SLO. Counts each request once."""

    def __init__(self, slos: Mapping[str, Targets]) -> None:
        self._slos = slos
        self._seen = dict.fromkeys(slos, 0)
        self._undecided: list[tuple[Outcome, Targets]] = []
        self.misses = 0

    def update(self, run: ArmRun, now_s: float) -> int:
        """Judge all requests that can be judged by now, and return the number of misses so far."""
        for name, targets in self._slos.items():
            fresh = run.outcomes.get(name, [])[self._seen[name] :]
            self._seen[name] += len(fresh)
            self._undecided += [(outcome, targets) for outcome in fresh]
        verdicts = [(outcome, targets, _verdict(outcome, targets, now_s)) for outcome, targets in self._undecided]
        self._undecided = [(outcome, targets) for outcome, targets, met in verdicts if met is None]
        self.misses += sum(met is False for _, _, met in verdicts)
        return self.misses


def _verdict(outcome: Outcome, targets: Targets, now_s: float) -> bool | None:
    """Return whether the request met its SLO; None while that is undecided."""
    if outcome.finished_s is not None or outcome.error is not None:
        return has_met(outcome, targets)
    waited_s = now_s - outcome.due_s
    to_first_s = waited_s if outcome.ttft_s is None else outcome.ttft_s
    overdue = ((targets.ttft_ms, to_first_s), (targets.e2e_ms, waited_s))
    return False if any(target_ms is not None and s > target_ms / 1000 for target_ms, s in overdue) else None
