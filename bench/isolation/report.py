"""The report of an experiment, as a record: the sections of its text and of its page, in the order of reading.

The tables are made in `tables`, and the drawings in `drawings`. Needs no plotting library.
"""

import json
from collections.abc import Mapping

from bench.isolation import tables
from bench.isolation.arms import OURS
from bench.isolation.goodput import Probe
from bench.isolation.result import Result, as_dict, tiers_used
from bench.isolation.summary import compare_all
from loadtest.reporting.formats import percent
from loadtest.reporting.record import Card, Drawing, Fold, Provenance, Record, Section

HOW = (
    "Arms are interleaved on one machine, with the same requests from the same seed; arrivals do not wait for answers. "
    "Times are taken at the client's socket, from when a request was due. A request that was refused, failed or did "
    "not end is a miss. Intervals are 95 % bootstrap intervals."
)


ARMS, OVER_TIME = "The arms, times in ms", "Over time"
Drawings = Mapping[str, tuple[Drawing, ...]]  # the drawings of each section, by the section's title


def isolation_record(result: Result, provenance: Provenance, drawings: Drawings) -> Record:
    """Return the report as a record. `drawings` are shown on the page only, and may be empty."""
    return Record(
        result.experiment.title,
        sections=_sections(result, drawings),
        data=as_dict(result),
        provenance=provenance,
        warnings=result.warnings,
        cards=_cards(result),
        kicker=result.experiment.name,
    )


def _sections(result: Result, drawings: Drawings) -> list[Section]:
    versus, over_time = tables.versus_table(result), drawings.get(OVER_TIME, ())
    sections = [
        Section("Goals", tables.goals_table(result.goals)) if result.goals else None,
        _controls(result) if result.controls else None,
        Section(ARMS, tables.arms_table(result.arms), explanation=HOW, drawings=drawings.get(ARMS, ())),
        Section("Mixed ÷ alone (95 % interval)", versus) if versus.rows else None,
        Section("Jobs with deadlines", tables.jobs_table(result)) if result.has_jobs else None,
        Section(OVER_TIME, explanation="One part of each mixed arm, the first.", drawings=over_time)
        if over_time
        else None,
        Section("By class", tables.classes_table(result)),
        Section("Inside the engine", tables.engine_table(result.arms), explanation="From the server's own metrics."),
        _sweep_section(result),
        _setup(result),
    ]
    return [section for section in sections if section is not None]


def _controls(result: Result) -> Section:
    text = "An arm that lacks the mechanism has to fail, or the experiment shows nothing."
    if any(control.failed is False for control in result.controls):
        text = "A control did not fail: this load is too light to show anything."
    return Section("Negative controls", tables.controls_table(result.controls), explanation=text)


def _cards(result: Result) -> list[Card]:
    ours = result.arms.get(OURS)
    versus = compare_all(result.arms).get(OURS)
    cards = []
    if ours is not None:
        cards.append(Card(percent(ours.total.share), "of interactive requests within their SLO, beside bulk"))
    if versus is not None and (p50 := versus.latency.ttft_p50) and (p99 := versus.latency.ttft_p99):
        ratios = f"{p50.value:.2f}× / {p99.value:.2f}×"
        cards.append(Card(ratios, "first token beside bulk ÷ alone, median / p99"))
    if versus is not None and versus.bulk_harvest is not None:
        cards.append(Card(percent(versus.bulk_harvest), "of what interactive leaves is harvested by bulk"))
    if ours is not None and ours.jobs.share is not None:
        cards.append(Card(percent(ours.jobs.share), "of admitted jobs done before their deadline"))
    for name, seconds in result.settling_s.items():
        cards.append(Card(f"{seconds:.1f} s", f"{name}: to settle after the step"))
    return cards


def _sweep_section(result: Result) -> Section | None:
    if result.sweep is None:
        return None
    text = (
        "A4 is the best of these fixed budgets for bulk: the most bulk among those that keep the SLO, or else the "
        "one that comes closest."
    )
    return Section("The static budgets that were tried", tables.sweep_table(result.sweep), explanation=text)


def _setup(result: Result) -> Section:
    facts = [
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
