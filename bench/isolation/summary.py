"""The summary of each arm over all its rounds, from the client's outcomes and from the server's own metrics. Pure.

Knows outcomes and metric readings; does not know goals or how results are shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.isolation.arms import BULK_ALONE, PEER_BULK, Arm, has_slo
from bench.isolation.experiments import has_deadline
from bench.isolation.rounds import Part, Rounds
from bench.isolation.slos import Attainment, attainment_of
from loadtest.client.runner import ArmRun
from loadtest.client.server_metrics import bucket_quantile
from loadtest.estimates import (
    ClassSummary,
    Distribution,
    LatencyRatios,
    busy_share,
    harvest,
    lag_p99_s,
    latency_ratios,
    summarize,
)
from loadtest.traffic.scenario import Scenario, Targets, TrafficClass

PREEMPTION_MODES = ("pause", "swap", "recompute")
REFUSED = (429, 503)  # HTTP status of requests that admission refused; these did not miss their deadlines


@dataclass(frozen=True, slots=True)
class EngineView:
    """The server's own metrics over the measured windows. A value is None if the server does not export its metric."""

    busy_share: float | None
    step_p50_s: float | None
    step_p99_s: float | None
    reaction_p50: float | None  # time from arrival to first step ÷ duration of the step that ran at the arrival
    reaction_p99: float | None
    suspensions: float | None  # how often a step of bulk was suspended
    wasted_share: float | None  # share of bulk's engine time in steps that were suspended and dropped
    recomputed_tokens: float | None  # tokens computed again because their KV was dropped
    step_time_error: float | None
    preemptions: dict[str, float]
    moves: float | None  # number of changes of knobs by the controller


@dataclass(frozen=True, slots=True)
class ArmSummary:
    arm: Arm
    classes: dict[str, ClassSummary]
    attainment: dict[str, Attainment]  # of the interactive classes
    ttft: Distribution  # of all interactive classes
    itl: Distribution
    e2e: Distribution
    jobs: Attainment  # of the admitted jobs, which are bulk requests with deadlines
    met_per_s: float  # interactive requests per second that met their SLO
    bulk_tokens_per_s: float
    engine: EngineView
    lag_p99_s: float
    client_cpu_share: float
    was_quiet: bool

    @property
    def total(self) -> Attainment:
        return sum(self.attainment.values(), Attainment(0, 0))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of a mixed arm with the same system under interactive traffic alone and under bulk alone.

    `bulk_kept` is the bulk throughput ÷ that of bulk alone. `bulk_harvest` is the bulk throughput ÷ the part of bulk's
    own rate that interactive traffic leaves. Both are None if they were not measured.
    """

    latency: LatencyRatios
    bulk_kept: float | None
    bulk_harvest: float | None


def summarize_arms(rounds: Rounds, scenario: Scenario, slos: Mapping[str, Targets]) -> dict[str, ArmSummary]:
    return {name: _summarize(parts, scenario, slos) for name, parts in rounds.parts.items() if parts}


def _summarize(parts: Sequence[Part], scenario: Scenario, slos: Mapping[str, Targets]) -> ArmSummary:
    runs = [part.run for part in parts]
    classes = {name: summarize(runs, name) for name in runs[0].outcomes}
    interactive = [c.name for c in scenario.with_role("interactive") if c.name in classes]
    attainment = {n: attainment_of((o for r in runs for o in r.outcomes[n]), slos[n]) for n in interactive}
    return ArmSummary(
        parts[0].arm,
        classes,
        attainment,
        ttft=_pooled([classes[n].ttft for n in interactive]),
        itl=_pooled([classes[n].itl for n in interactive]),
        e2e=_pooled([classes[n].e2e for n in interactive]),
        jobs=sum((_admitted(runs, c) for c in scenario.classes.values() if has_deadline(c)), Attainment(0, 0)),
        met_per_s=sum(a.met for a in attainment.values()) / sum(run.duration_s for run in runs),
        bulk_tokens_per_s=sum(s.tokens_per_s for n, s in classes.items() if n not in interactive),
        engine=_engine_view(parts),
        lag_p99_s=lag_p99_s(runs),
        client_cpu_share=max(run.client_cpu_share for run in runs),
        was_quiet=all(part.was_quiet for part in parts),
    )


def _admitted(runs: Sequence[ArmRun], traffic: TrafficClass) -> Attainment:
    sent = (o for run in runs for o in run.outcomes.get(traffic.name, []))
    return attainment_of((o for o in sent if o.status not in REFUSED), traffic.targets)


def _pooled(distributions: Sequence[Distribution]) -> Distribution:
    return Distribution(np.concatenate([d.samples for d in distributions] or [np.empty(0)]))


def _engine_view(parts: Sequence[Part]) -> EngineView:
    tiers = (parts[0].arm.tiers or {"tiers": {}})["tiers"]
    with_slos = [name for name, tier in tiers.items() if has_slo(tier)]
    return EngineView(
        busy_share=busy_share([part.run for part in parts]),
        step_p50_s=_quantile(parts, "tidegate_step_seconds", 0.5),
        step_p99_s=_quantile(parts, "tidegate_step_seconds", 0.99),
        reaction_p50=_quantile(parts, "tidegate_reaction_steps", 0.5, with_slos),
        reaction_p99=_quantile(parts, "tidegate_reaction_steps", 0.99, with_slos),
        suspensions=_grown(parts, "tidegate_step_suspensions_total"),
        wasted_share=_wasted_share(parts, [name for name in tiers if name not in with_slos]),
        recomputed_tokens=_grown(parts, "tidegate_recomputed_tokens_total"),
        step_time_error=_mean(parts, "tidegate_step_time_error_ratio"),
        preemptions={m: _grown(parts, "tidegate_num_preemptions_total", mode=m) or 0.0 for m in PREEMPTION_MODES},
        moves=_grown(parts, "tidegate_controller_decisions_total"),
    )


def _wasted_share(parts: Sequence[Part], bulk_tiers: Sequence[str]) -> float | None:
    wasted_s = _grown(parts, "tidegate_dropped_step_seconds_total")
    used = [_grown(parts, "tidegate_engine_seconds_total", tier=tier) for tier in bulk_tiers]
    spent_s = sum(seconds for seconds in used if seconds is not None) + (wasted_s or 0.0)
    return wasted_s / spent_s if wasted_s is not None and spent_s else None


def _grown(parts: Sequence[Part], name: str, **labels: str) -> float | None:
    deltas = [delta for part in parts if (delta := part.timeline.delta(name, **labels)) is not None]
    return sum(deltas) if deltas else None


def _quantile(parts: Sequence[Part], name: str, q: float, tiers: Sequence[str] | None = None) -> float | None:
    """Return a quantile of a histogram over all windows. If `tiers` is given, only these tiers are counted."""
    counts: dict[float, float] = {}
    labels: list[dict[str, str]] = [{}] if tiers is None else [{"tier": tier} for tier in tiers]
    for part in parts:
        for chosen in labels:
            for bound, count in part.timeline.buckets(name, **chosen).items():
                counts[bound] = counts.get(bound, 0.0) + count
    return bucket_quantile(dict(sorted(counts.items())), q)


def _mean(parts: Sequence[Part], name: str) -> float | None:
    """Return the mean of a histogram over all windows, or the mean of a gauge over all readings.

    None if there is no such metric.
    """
    count, total = _grown(parts, f"{name}_count"), _grown(parts, f"{name}_sum")
    if count and total is not None:
        return total / count
    values = [value for part in parts for _, value in part.timeline.gauge(name)]
    return float(np.mean(values)) if values else None


def compare(mixed: ArmSummary, alone: ArmSummary, bulk_alone: ArmSummary | None) -> Comparison:
    bulk = bulk_alone.bulk_tokens_per_s if bulk_alone else 0.0
    return Comparison(
        latency=latency_ratios(mixed, alone),
        bulk_kept=mixed.bulk_tokens_per_s / bulk if bulk else None,
        bulk_harvest=harvest(mixed.bulk_tokens_per_s, bulk, alone.engine.busy_share),
    )


def compare_all(arms: Mapping[str, ArmSummary]) -> dict[str, Comparison]:
    """Return, for every mixed arm, the comparison with the same system under one kind of traffic alone.

    Mixed arms are left out if interactive traffic alone was not measured on their system.
    """
    found = {}
    for name, summary in arms.items():
        alone = arms.get(summary.arm.alone)
        if summary.arm.is_mixed and alone is not None:
            found[name] = compare(summary, alone, arms.get(PEER_BULK if summary.arm.is_peer else BULK_ALONE))
    return found
