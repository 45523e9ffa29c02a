"""What each interactive class is promised: the same for the tiers that keep it and for the judgement. Pure.

Knows the order in which the command, the scenario and the tiers are asked; not arms or time.
"""

from bench.isolation.arms import PREMIUM_SERVICE_TIERS, Document
from loadtest.traffic.scenario import Scenario, Targets, TrafficClass
from scheduler.config import TierSet, parse_tiers

PREMIUM_PROMISE_SHARE = 0.6  # of the default tier's first token: the top tier's, where the scenario names none


def targets_of(traffic: TrafficClass, tiers: TierSet, promise: Targets) -> Targets:
    """What the class is judged by: what the command says, else what the scenario says, else what its tier promises."""
    tier = tiers.for_service_tier(traffic.service_tier or "auto") or tiers[tiers.default_tier]
    own = traffic.targets
    return Targets(
        ttft_ms=promise.ttft_ms or own.ttft_ms or tier.slo.ttft_p99_ms,
        itl_ms=promise.itl_ms or own.itl_ms or tier.slo.itl_p99_ms,
        e2e_ms=own.e2e_ms,
    )


def premium_ttft_ms(scenario: Scenario, ours: Document, promise: Targets) -> float | None:
    """The first token of a tier above the default one. From the command's promise; else the tightest that the scenario
    has for a class of that tier; else from the default tier's. None: nobody promises one."""
    if promise.ttft_ms is not None:
        return PREMIUM_PROMISE_SHARE * promise.ttft_ms
    own = [c.targets.ttft_ms for c in scenario.with_role("interactive") if is_premium(c)]
    if said := [ttft_ms for ttft_ms in own if ttft_ms is not None]:
        return min(said)
    tiers = parse_tiers(ours)
    base_ms = tiers[tiers.default_tier].slo.ttft_p99_ms
    return None if base_ms is None else PREMIUM_PROMISE_SHARE * base_ms


def promises_by_class(
    scenario: Scenario, tiers: TierSet, promise: Targets, premium_ttft_ms: float | None = None
) -> dict[str, Targets]:
    """`premium_ttft_ms`: what a tier above the default one promises, where there is one, to the classes in it."""
    promises = {c.name: targets_of(c, tiers, promise) for c in scenario.with_role("interactive")}
    if premium_ttft_ms is None:
        return promises
    top = [c.name for c in scenario.with_role("interactive") if is_premium(c)]
    return promises | {name: promises[name].model_copy(update={"ttft_ms": premium_ttft_ms}) for name in top}


def is_premium(traffic: TrafficClass) -> bool:
    return traffic.service_tier in PREMIUM_SERVICE_TIERS
