"""The SLO of each interactive class: the same for the tiers that keep it and for the judgement. Pure.

Knows the order of precedence of the command, the scenario and the tiers; not arms or time.
"""

from bench.isolation.arms import PREMIUM_SERVICE_TIERS, Document
from loadtest.traffic.scenario import Scenario, Targets, TrafficClass
from scheduler.config import TierSet, parse_tiers

PREMIUM_SLO_SHARE = 0.6  # TTFT SLO of the top tier ÷ that of the default tier, where the scenario names none


def targets_of(traffic: TrafficClass, tiers: TierSet, slo: Targets) -> Targets:
    """Return the SLO of the class: that of the command, else of the scenario, else of the class's tier."""
    tier = tiers.for_service_tier(traffic.service_tier or "auto") or tiers[tiers.default_tier]
    own = traffic.targets
    return Targets(
        ttft_ms=slo.ttft_ms or own.ttft_ms or tier.slo.ttft_p99_ms,
        itl_ms=slo.itl_ms or own.itl_ms or tier.slo.itl_p99_ms,
        e2e_ms=own.e2e_ms,
    )


def premium_ttft_ms(scenario: Scenario, ours: Document, slo: Targets) -> float | None:
    """Return the TTFT SLO of a tier above the default one; None where there is no TTFT SLO at all.

    It comes from the command's SLO, else from the tightest that the scenario has for a class of that tier, else from
    the default tier's.
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
    """Return the SLO of each interactive class. `premium_ttft_ms` is that of the classes in a tier above the default
    one."""
    slos = {c.name: targets_of(c, tiers, slo) for c in scenario.with_role("interactive")}
    if premium_ttft_ms is None:
        return slos
    top = [c.name for c in scenario.with_role("interactive") if is_premium(c)]
    return slos | {name: slos[name].model_copy(update={"ttft_ms": premium_ttft_ms}) for name in top}


def is_premium(traffic: TrafficClass) -> bool:
    return traffic.service_tier in PREMIUM_SERVICE_TIERS
