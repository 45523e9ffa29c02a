"""The summary of a simulated run: latencies, attainment and shares, computed from its observation.

All functions are pure. Quantile q is the smallest sample x for which at least a share q of all samples is ≤ x. It is
not interpolated, so that the same run gives the same digits on any machine. If a TTFT is compared with an SLO, a
rejected or unanswered request counts as infinite. Knows records; does not know text.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from loadtest.simulation.clients import UNFINISHED
from loadtest.simulation.observation import Observation, RequestRecord, TierMoment
from scheduler.config import Tier, TierSet

ON_TIME = 0.99  # the SLO of deadlines: at least this share of the requests must meet theirs


@dataclass(frozen=True, slots=True)
class Spread:
    """The quantiles of some samples, in seconds.

    They are None without samples. A quantile is infinite if it falls on a request that was never answered.
    """

    count: int
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class ClassSummary:
    name: str
    tier: str
    offered: int
    admitted: int
    demoted: int
    rejected: dict[str, int]  # number by reason
    failed: dict[str, int]
    done: int
    unfinished: int
    ttft: Spread  # of requests with at least one token
    itl: Spread  # of gaps between two messages
    e2e: Spread  # of finished requests
    attainment: float | None  # share of the offered requests that met their SLO; None without an SLO
    tokens_per_s: float
    cached_share: float = 0.0  # of the prompt tokens of the requests with a first token, from prefix caches


@dataclass(frozen=True, slots=True)
class SloVerdict:
    """One SLO of one tier, judged over all requests that were sent to the tier."""

    tier: str
    what: str
    target: float
    observed: float | None  # None without samples
    is_kept: bool


@dataclass(frozen=True, slots=True)
class EnginesSummary:
    """The totals of all engines during the load."""

    workers: int  # the most at a time
    mean_workers: float
    busy_share: float
    steps: int
    sequences_per_step: float
    tokens_per_step: float
    lost_tokens: int
    suspensions: int
    dropped_steps: int
    predictor_error: float  # mean |measured ÷ predicted − 1|


@dataclass(frozen=True, slots=True)
class Summary:
    duration_s: float
    classes: Sequence[ClassSummary]
    queue: dict[str, Spread]  # by tier: seconds from arrival to the first step
    slos: Sequence[SloVerdict]
    engines: EnginesSummary
    preemptions: dict[tuple[str, str], int]  # (tier, mode) → number
    moves: dict[tuple[str, str, str], tuple[int, int]]  # (tier, knob, signal) → (moves up, moves down)
    knobs: dict[str, TierMoment]  # by tier: state at the end of the load; the knobs are the first worker's

    @property
    def keeps_slos(self) -> bool:
        return all(slo.is_kept for slo in self.slos)

    @property
    def done(self) -> int:
        return sum(c.done for c in self.classes)


def summarize(observation: Observation, tiers: TierSet) -> Summary:
    by_class: dict[str, list[RequestRecord]] = {name: [] for name in observation.classes}
    for record in observation.requests:
        by_class[record.traffic_class].append(record)
    classes = [_class_summary(name, records, observation, tiers) for name, records in by_class.items()]
    moves: dict[tuple[str, str, str], tuple[int, int]] = {}
    for move in observation.moves:
        key = (move.decision.tier, move.decision.knob, move.decision.signal)
        up, down = moves.get(key, (0, 0))
        is_up = move.decision.new > move.decision.old
        moves[key] = (up + is_up, down + (not is_up))
    return Summary(
        duration_s=observation.duration_s,
        classes=classes,
        queue={tier: spread(observation.queue_s.get(tier, ())) for tier in tiers.tiers},
        slos=_slos(observation, tiers),
        engines=_engines_summary(observation),
        preemptions=dict(sorted(observation.preemptions.items())),
        moves=dict(sorted(moves.items())),
        knobs=next((m.tiers for m in reversed(observation.moments) if m.at_s <= observation.duration_s), {}),
    )


def spread(samples: Iterable[float]) -> Spread:
    ordered = np.sort(np.fromiter(samples, dtype=np.float64))
    return Spread(
        len(ordered),
        quantile(ordered, 0.5),
        quantile(ordered, 0.95),
        quantile(ordered, 0.99),
        float(ordered[-1]) if len(ordered) else None,
    )


def quantile(ordered: np.ndarray, q: float) -> float | None:
    """Return the quantile `q` of samples in ascending order; None without samples."""
    return float(ordered[max(0, math.ceil(q * len(ordered) - 1e-9) - 1)]) if len(ordered) else None


def meets_slo(record: RequestRecord, tier: Tier) -> bool | None:
    """Return whether the request met the SLO of its tier and its own deadline; None if it has neither.

    The rules are those of the scheduler: TTFT in time, at most one gap in a hundred too long, and the deadline met.
    """
    if not tier.is_interactive and record.deadline_s is None:
        return None
    if not record.is_done or record.ttft_s is None or record.ended_s is None:
        return False
    target_ms = tier.slo.ttft_p99_ms
    in_time = target_ms is None or 1000 * record.ttft_s <= target_ms
    on_time = record.deadline_s is None or record.ended_s - record.arrived_s <= record.deadline_s
    return in_time and on_time and 100 * record.gaps_missed <= record.gaps


def _class_summary(
    name: str, records: Sequence[RequestRecord], observation: Observation, tiers: TierSet
) -> ClassSummary:
    tier = tiers[observation.classes[name]]
    judged = [met for met in (meets_slo(r, tier) for r in records) if met is not None]
    rejected = Counter(r.rejected for r in records if r.rejected)
    failed = Counter(r.failed for r in records if r.failed and r.failed != UNFINISHED)
    prompts = sum(r.prompt_tokens for r in records if r.first_token_s is not None)
    return ClassSummary(
        name=name,
        tier=tier.name,
        offered=len(records),
        admitted=len(records) - rejected.total(),
        demoted=sum(r.served_tier != r.tier for r in records if not r.rejected),
        rejected=dict(sorted(rejected.items())),
        failed=dict(sorted(failed.items())),
        done=sum(r.is_done for r in records),
        unfinished=sum(r.failed == UNFINISHED for r in records),
        ttft=spread(r.ttft_s for r in records if r.ttft_s is not None),
        itl=spread(observation.gaps_s.get(name, ())),
        e2e=spread(r.ended_s - r.arrived_s for r in records if r.is_done and r.ended_s is not None),
        attainment=sum(judged) / len(judged) if judged else None,
        tokens_per_s=observation.tokens[name] / observation.duration_s,
        cached_share=sum(r.cached_tokens for r in records) / prompts if prompts else 0.0,
    )


def _slos(observation: Observation, tiers: TierSet) -> list[SloVerdict]:
    slos: list[SloVerdict] = []
    for tier in tiers.by_priority:
        records = [r for r in observation.requests if r.tier == tier.name]
        if tier.slo.ttft_p99_ms is not None:
            waits = (math.inf if r.ttft_s is None else r.ttft_s for r in records)
            slos.append(_slo(tier.name, "TTFT p99", tier.slo.ttft_p99_ms / 1000, spread(waits).p99))
        if tier.slo.itl_p99_ms is not None:
            names = [n for n, t in observation.classes.items() if t == tier.name]
            gaps = [gap for n in names for gap in observation.gaps_s.get(n, ())]
            slos.append(_slo(tier.name, "ITL p99", tier.slo.itl_p99_ms / 1000, spread(gaps).p99))
        due = [meets_slo(r, tier) is True for r in records if r.deadline_s is not None]
        if due:
            share = sum(due) / len(due)
            slos.append(SloVerdict(tier.name, "deadlines met", ON_TIME, share, share >= ON_TIME))
    return slos


def _slo(tier: str, what: str, target_s: float, observed_s: float | None) -> SloVerdict:
    return SloVerdict(tier, what, target_s, observed_s, observed_s is None or observed_s <= target_s)


def _engines_summary(observation: Observation) -> EnginesSummary:
    engines = observation.engines
    steps, busy_s = sum(e.steps for e in engines), sum(e.busy_s for e in engines)
    errors = [m.predictor_error for m in observation.moments]
    numbers = [m.workers for m in observation.moments if m.at_s <= observation.duration_s] or [len(engines)]
    return EnginesSummary(
        workers=max(numbers),
        mean_workers=fmean(numbers),
        busy_share=busy_s / (observation.duration_s * fmean(numbers)),
        steps=steps,
        sequences_per_step=sum(e.rows for e in engines) / max(steps, 1),
        tokens_per_step=sum(e.planned_tokens for e in engines) / max(steps, 1),
        lost_tokens=sum(e.lost_tokens for e in engines),
        suspensions=sum(e.suspensions for e in engines),
        dropped_steps=sum(e.dropped_steps for e in engines),
        predictor_error=sum(errors) / max(len(errors), 1),
    )
