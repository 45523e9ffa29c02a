"""An experiment's result as a page to look at.

Knows what a reader wants first; the numbers, tables and drawings are made elsewhere.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from bench.isolation import plots, plots_over_time, tables
from bench.isolation.arms import OURS, Document
from bench.isolation.goodput import Probe
from bench.isolation.page import Card, Drawing, Fold, Page, Section
from bench.isolation.record import Result, tiers_used
from bench.isolation.summary import compare_all
from loadtest.machine import hardware
from scheduler.config import parse_tiers

HOW = (
    "Arms are interleaved on one machine, with the same requests from the same seed; arrivals do not wait for answers. "
    "Times are taken at the client's socket, from when a request was due. A request that was refused, failed or had no "
    "end is a miss. Intervals are 95 % bootstrap intervals."
)


def experiment_page(result: Result, command: str, model: str, seed: int) -> Page:
    first_promise = next(iter(result.promises.values()))
    sections = [
        Section("Goals", table=tables.goals_table(result.goals) if result.goals else None),
        Section("Negative controls", _controls_text(result), tables.controls_table(result.controls))
        if result.controls
        else None,
        Section(
            "The arms",
            HOW,
            tables.arms_table(result.arms),
            figures=(
                Drawing(plots.latency_by_arm(result.arms, first_promise.ttft_ms), "First tokens"),
                Drawing(plots.harvest_by_arm(result.arms), "What interactive gets, and what bulk gets"),
            ),
        ),
        Section("Against the arms alone", table=tables.versus_table(result)) if compare_all(result.arms) else None,
        Section("Jobs with deadlines", table=tables.jobs_table(result)) if result.has_jobs else None,
        Section("Over time", "One part of each mixed arm, the first.", figures=_over_time(result)),
        Section("By class", table=tables.classes_table(result)),
        Section("Inside the engine", "From the server's own metrics.", tables.engine_table(result.arms)),
        _sweep_section(result),
        _setup(result, command, model, seed),
    ]
    return Page(
        kicker=f"{result.experiment.name}",
        title=result.experiment.title,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        hardware=hardware(),
        sections=[s for s in sections if s is not None],
        cards=_cards(result),
        warnings=result.warnings,
    )


def _controls_text(result: Result) -> str:
    if any(control.failed is False for control in result.controls):
        return "A control did not fail: this load is too light to show anything."
    return "An arm that lacks the mechanism has to fail, or the experiment shows nothing."


def _cards(result: Result) -> list[Card]:
    ours = result.arms.get(OURS)
    versus = compare_all(result.arms).get(OURS)
    cards = []
    if ours is not None:
        cards.append(Card(tables.share(ours.total.share), "of interactive requests within the promise, beside bulk"))
    if versus is not None and (p50 := versus.latency.ttft_p50) and (p99 := versus.latency.ttft_p99):
        ratios = f"{p50.value:.2f}× / {p99.value:.2f}×"
        cards.append(Card(ratios, "first token beside bulk ÷ alone, median / p99"))
    if versus is not None and versus.bulk_harvest is not None:
        cards.append(Card(tables.share(versus.bulk_harvest), "of what interactive leaves is harvested by bulk"))
    if ours is not None and ours.jobs.share is not None:
        cards.append(Card(tables.share(ours.jobs.share), "of admitted jobs done before their deadline"))
    for name, seconds in result.settling_s.items():
        cards.append(Card(f"{seconds:.1f} s", f"{name}: to settle after the step"))
    return cards


def _over_time(result: Result) -> tuple[Drawing, ...]:
    drawings = []
    if result.experiment.shape.factor != 1.0:
        drawings.append(Drawing(plots.attainment_over_time(result), "Within the promise, all rounds"))
    shown = [parts[0] for parts in result.rounds.parts.values() if parts[0].arm.is_mixed]
    span_ms = plots_over_time.first_token_span_ms(shown, result.promises)
    top_rate = 1.1 * max((plots_over_time.bulk_rate(p, result.scenario)[1].max() for p in shown), default=1.0) or 1.0
    for part in shown:
        title = f"{part.arm.name}, {part.arm.title}"
        drawing = plots_over_time.arm_over_time(part, result.scenario, result.promises, span_ms, top_rate)
        drawings.append(Drawing(drawing, title, "Dashed: the promise. A cross is a request that missed one."))
        tiers = _steered_tiers(part.arm.tiers)
        knobs = plots_over_time.knobs_over_time(part, tiers) if tiers else None
        if knobs is not None:
            drawings.append(Drawing(knobs, caption=f"{part.arm.name}: the controller's knobs, once a second."))
    return tuple(drawings)


def _steered_tiers(document: Document | None) -> Sequence[str]:
    """Those that requests are in, where a controller moves anything at all."""
    if document is None or not parse_tiers(document).controller.feedback:
        return ()
    return [tier.name for tier in parse_tiers(document).by_priority if tier.service_tiers]


def _sweep_section(result: Result) -> Section | None:
    if result.sweep is None:
        return None
    text = (
        "A4 is the best of these fixed budgets for bulk: the most bulk among those that keep the promise, or else the "
        "one that comes closest."
    )
    return Section("The static budgets that were tried", text, tables.sweep_table(result.sweep))


def _setup(result: Result, command: str, model: str, seed: int) -> Section:
    facts = [
        ("command", command),
        ("model", model),
        ("seed", str(seed)),
        ("lengths", f"{result.length_scale:g} × the scenario's"),
        ("load", tables.load_line(result)),
        ("measured", f"{result.timing.duration_s:g} s of each arm, in {result.timing.rounds} parts"),
        ("scenario", result.scenario.description or "a file"),
    ]
    if result.goodput is not None:
        tried = ", ".join(_probe(probe) for probe in result.goodput.probes)
        facts.append(("solo goodput", f"{tables.goodput_line(result.goodput)}; tried {tried}"))
    for name, arm in result.arms.items():
        lag = f"{name}: {arm.client_cpu_share:.0%} of a core, {1e3 * arm.lag_p99_s:.1f} ms late (p99)"
        facts.append(("client", lag))
    folds = [Fold("the scenario as it was sent", json.dumps(result.scenario.model_dump(mode="json"), indent=2))]
    folds += [
        Fold(f"the tiers of {name}", json.dumps(document, indent=2)) for name, document in tiers_used(result).items()
    ]
    if result.explained is not None:
        folds.append(Fold("GET /admin/sla after the last part", json.dumps(result.explained, indent=2)))
    return Section("How it was run", facts=tuple(facts), folds=tuple(folds))


def _probe(probe: Probe) -> str:
    least = " or more" if probe.was_cut else ""
    return f"{probe.clients:.3g}×: {probe.missed}{least} of {probe.offered} late"
