"""The SLO of each interactive class. The tiers are given this SLO, and the results are judged by it. Pure.

Knows the order of precedence: the command's flags, then the scenario, then the tiers. Does not know arms or times.
"""

from bench.isolation.arms import PREMIUM_SERVICE_TIERS, Document
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
