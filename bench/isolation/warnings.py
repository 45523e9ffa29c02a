"""Warnings about an experiment: the reasons not to trust its numbers. Pure."""

from bench.isolation.arms import BULK_ALONE
from bench.isolation.result import Result
from bench.isolation.summary import ArmSummary
from loadtest.estimates import client_warnings, failure_warnings
from loadtest.traffic.scenario import Targets

BULK_NOISE = 1.05  # bulk throughput of a mixed arm ÷ that of bulk alone; a ratio up to this may be noise


def warnings_of(result: Result) -> list[str]:
    found = [w for arm in result.arms.values() for w in arm_warnings(arm)]
    return [*found, *_bulk_warnings(result), *_load_warnings(result), *_slo_warnings(result)]


def arm_warnings(arm: ArmSummary) -> list[str]:
    name = arm.arm.name
    found = [f"{name}: {warning}" for warning in client_warnings(arm.lag_p99_s, arm.client_cpu_share)]
    if not arm.was_quiet:
        found.append(f"{name}: the server still worked for the arm before when a part of this one began")
    return found + failure_warnings(name, arm.classes)


def _bulk_warnings(result: Result) -> list[str]:
    alone = result.arms.get(BULK_ALONE)
    if alone is None:
        return []
    better = [a.arm.name for a in result.arms.values() if a.arm.tiers and _has_more_bulk(a, alone)]
    if not better:
        return []
    return [
        f"Bulk got more in {', '.join(better)}, beside interactive traffic, than alone in {BULK_ALONE}: a run too "
        "short, a machine that others use, or a batch not the best for bulk. Harvest says too much."
    ]


def _has_more_bulk(arm: ArmSummary, alone: ArmSummary) -> bool:
    return arm.arm.is_mixed and arm.bulk_tokens_per_s > BULK_NOISE * alone.bulk_tokens_per_s


def _load_warnings(result: Result) -> list[str]:
    if result.goodput is None:
        return [
            f"The load was given (--clients {result.clients:g}): what interactive traffic sustains alone was not "
            "measured, and no share of it is known."
        ]
    if not result.goodput.clients:
        return [
            f"No load that was tried alone kept the SLO: the lowest, {result.clients:.3g} × the scenario's, was "
            "taken as the solo goodput. SLOs of so few milliseconds need a faster machine, shorter lengths "
            "(--scale), or a longer SLO (--ttft-ms, --itl-ms)."
        ]
    if result.goodput.breaks_at is None:
        return [
            f"The search for the solo goodput ended at {result.clients:.3g} × the scenario's load, which held, and "
            "tried none that did not: it may be more (--search-budget)."
        ]
    return []


def _slo_warnings(result: Result) -> list[str]:
    names = [name for name, targets in result.slos.items() if targets == Targets()]
    if not names:
        return []
    return [f"There is no SLO for {', '.join(names)}: only requests without an answer count as late (--ttft-ms)."]
