"""The record of a simulated run. It has the same digits for the same run on any machine, so that runs can be compared.

Therefore it contains no date and no hardware. Knows how results look; computes only units and roundings.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from loadtest.reporting.formats import ABSENT, number, percent
from loadtest.reporting.record import Record, Section, Table
from loadtest.simulation.cost_card import CostCard
from loadtest.simulation.frontier import Frontier
from loadtest.simulation.observation import Observation, RequestRecord, TierMoment
from loadtest.simulation.summary import ClassSummary, EnginesSummary, SloVerdict, Summary, quantile


def simulation_record(
    title: str, summary: Summary, card: CostCard, observation: Observation, options: dict[str, Any]
) -> Record:
    """Return the record of a run. `options` are the command's flags, which become part of the JSON."""
    data = {**options, **simulation_data(summary, observation)}
    return Record(f"{title}; times in ms", simulation_sections(summary, card), data)


def frontier_record(title: str, frontier: Frontier, options: dict[str, Any]) -> Record:
    """Return the record of a frontier. `options` are the command's flags, which become part of the JSON."""
    header = ("max_slowdown", "answers", "TTFT p50", "p99", "bulk", "its limit", "÷ limit")
    rows = [
        (
            f"{p.max_slowdown:g}",
            number(p.slowdown),
            number(p.ttft_p50),
            number(p.ttft_p99),
            number(p.harvest, 3),
            number(p.limit, 3),
            number(p.harvest / p.limit),
        )
        for p in frontier.points
    ]
    notes = (
        f"interactive traffic alone: engine busy {percent(frontier.busy_share)}; bulk alone, without limits: "
        f"{frontier.bulk_tokens_per_s:.0f} tokens/s; in steps of others it gets {frontier.gain:.2f} times as much done",
    )
    sections = [Section(table=Table.of(header, rows), notes=notes)]
    return Record(f"{title}; each ÷ alone", sections, {**options, "frontier": asdict(frontier)})


def simulation_sections(summary: Summary, card: CostCard) -> list[Section]:
    return [
        _requests(summary.classes),
        Section(table=_latencies(summary.classes)),
        Section(table=_queues(summary)),
        Section(notes=(_engines(summary.engines), *_preemptions(summary), _cost(summary, card))),
        _moves(summary),
        Section(notes=tuple(_slo(slo) for slo in summary.slos)),
    ]


def _requests(classes: Sequence[ClassSummary]) -> Section:
    header = ("class", "tier", "offered", "admitted", "demoted", "done", "failed", "unfinished", "kept", "tok/s")
    rows = [
        (
            c.name,
            c.tier,
            *(str(n) for n in (c.offered, c.admitted, c.demoted, c.done, sum(c.failed.values()), c.unfinished)),
            percent(c.attainment, 2),
            f"{c.tokens_per_s:.1f}",
        )
        for c in classes
    ]
    notes = [
        f"{c.name}: {count} {kind} ({reason})"
        for c in classes
        for kind, counted in (("rejected", c.rejected), ("failed", c.failed))
        for reason, count in counted.items()
    ]
    notes += [
        f"{c.name}: {percent(c.cached_share, 1)} of the prompt tokens from prefix caches"
        for c in classes
        if c.cached_share
    ]
    return Section(table=Table.of(header, rows), notes=tuple(notes))


def _latencies(classes: Sequence[ClassSummary]) -> Table:
    header = ("class", "TTFT p50", "p95", "p99", "ITL p50", "p99", "max", "E2E p50", "p95", "p99")
    rows = [
        (
            c.name,
            *_cells(c.ttft.p50, c.ttft.p95, c.ttft.p99),
            *_cells(c.itl.p50, c.itl.p99, c.itl.max),
            *_cells(c.e2e.p50, c.e2e.p95, c.e2e.p99),
        )
        for c in classes
    ]
    return Table.of(header, rows)


def _queues(summary: Summary) -> Table:
    header = ("tier", "started", "queued p50", "p95", "p99", "max")
    rows = [
        (tier, str(waited.count), *_cells(waited.p50, waited.p95, waited.p99, waited.max))
        for tier, waited in summary.queue.items()
    ]
    return Table.of(header, rows)


def _engines(engines: EnginesSummary) -> str:
    return (
        f"engines: {_number(engines)}, busy {percent(engines.busy_share, 2)}; {engines.steps} steps of "
        f"{engines.sequences_per_step:.1f} sequences and {engines.tokens_per_step:.1f} tokens; "
        f"predictor error {percent(engines.predictor_error, 2)}"
    )


def _number(engines: EnginesSummary) -> str:
    if engines.mean_workers == engines.workers:
        return str(engines.workers)
    return f"up to {engines.workers}, {engines.mean_workers:.2f} on average"


def _preemptions(summary: Summary) -> list[str]:
    engines = summary.engines
    counted = ", ".join(f"{tier} {mode} {n}" for (tier, mode), n in summary.preemptions.items())
    return [
        f"preemptions: {counted or 'none'}; {engines.lost_tokens} tokens lost with their KV",
        f"suspended between layers: {engines.suspensions} times; {engines.dropped_steps} steps dropped",
    ]


def _cost(summary: Summary, card: CostCard) -> str:
    paid = card.price_per_hour * summary.engines.mean_workers * summary.duration_s / 3600
    tokens = sum(c.tokens_per_s for c in summary.classes) * summary.duration_s
    if not paid or not summary.done:
        return "cost: no price is on the card" if not paid else "cost: nothing was done"
    per_request, per_token = 1e6 * paid / summary.done, 1e6 * paid / max(tokens, 1.0)
    return f"cost: {per_request:.2f} a million requests, {per_token:.2f} a million output tokens"


def _moves(summary: Summary) -> Section:
    rows = [(*key, str(up), str(down)) for key, (up, down) in summary.moves.items()]
    at_the_end = tuple(f"at the end: {tier} {_knobs(moment)}" for tier, moment in summary.knobs.items())
    if not rows:
        return Section(notes=("the controller moved no knob", *at_the_end))
    return Section(table=Table.of(("tier", "knob", "moved by", "up", "down"), rows), notes=at_the_end)


def _knobs(moment: TierMoment) -> str:
    wait_ms = 1000 * moment.max_wait_s
    return f"batch size {moment.batch_size:g}, max-wait {wait_ms:.1f} ms, margin {moment.margin:.3f}"


def _slo(slo: SloVerdict) -> str:
    is_share = slo.what == "deadlines met"
    observed = percent(slo.observed, 2) if is_share else _cells(slo.observed)[0]
    target = f"at least {percent(slo.target, 2)}" if is_share else f"at most {1000 * slo.target:.0f}"
    return f"{slo.tier} {slo.what}: {observed}, SLO {target}: {'kept' if slo.is_kept else 'BROKEN'}"


def _cells(*seconds: float | None) -> tuple[str, ...]:
    return tuple(ABSENT if s is None else "never" if math.isinf(s) else f"{1000 * s:.1f}" for s in seconds)


def simulation_data(summary: Summary, observation: Observation) -> dict[str, Any]:
    found: dict[str, Any] = _finite(
        {"summary": _summary_data(summary), "moves": _moves_data(observation), "seconds": _seconds(observation)}
    )
    return found


def _summary_data(summary: Summary) -> dict[str, Any]:
    moves = [
        {"tier": t, "knob": k, "signal": s, "up": up, "down": down} for (t, k, s), (up, down) in summary.moves.items()
    ]
    preemptions = [{"tier": tier, "mode": mode, "count": n} for (tier, mode), n in summary.preemptions.items()]
    return {
        "duration_s": summary.duration_s,
        "keeps_promises": summary.keeps_slos,
        "promises": [asdict(slo) for slo in summary.slos],
        "classes": {c.name: asdict(c) for c in summary.classes},
        "queue_s": {tier: asdict(waited) for tier, waited in summary.queue.items()},
        "engines": asdict(summary.engines),
        "preemptions": preemptions,
        "moves": moves,
        "knobs_at_the_end": {tier: asdict(moment) for tier, moment in summary.knobs.items()},
    }


def _moves_data(observation: Observation) -> list[dict[str, Any]]:
    return [{"at_s": m.at_s, "worker": m.worker, **asdict(m.decision)} for m in observation.moves]


def _seconds(observation: Observation) -> list[dict[str, Any]]:
    """Return one entry for each second: the state at its end, and the requests that arrived during it."""
    arrived: dict[tuple[int, str], list[RequestRecord]] = {}
    for record in observation.requests:
        arrived.setdefault((int(record.arrived_s), record.traffic_class), []).append(record)
    return [
        asdict(moment)
        | {
            "classes": {
                name: _arrivals(arrived.get((round(moment.at_s) - 1, name), [])) for name in observation.classes
            }
        }
        for moment in observation.moments
    ]


def _arrivals(records: list[RequestRecord]) -> dict[str, Any]:
    waits = np.sort(np.array([r.ttft_s for r in records if r.ttft_s is not None], dtype=np.float64))
    return {
        "offered": len(records),
        "rejected": sum(bool(r.rejected) for r in records),
        "ttft_p50_s": quantile(waits, 0.5),
        "ttft_max_s": quantile(waits, 1.0),
    }


def _finite(value: Any) -> Any:
    """Return the value as JSON can hold it.

    Infinities, which JSON does not have, become None. Floats are rounded to 9 decimals.
    """
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return None if math.isinf(value) else round(value, 9)
    return value
