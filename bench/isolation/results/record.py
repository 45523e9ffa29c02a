"""The report of an experiment, as a record: the sections of its text and of its page, in the order of reading.

Also the warnings: the reasons not to trust its numbers. The tables are made in `tables`, and the drawings in `plots`.
Needs no plotting library.
"""

import json
from collections.abc import Mapping
from bench.isolation.results import tables
from bench.isolation.arms import OURS
from bench.isolation.tuning import Probe
from bench.isolation.results.result import Result, as_dict, tiers_used
from bench.isolation.summary import compare_all
from loadtest.reporting.formats import percent
from loadtest.reporting.record import Card, Drawing, Fold, Provenance, Record, Section
from bench.isolation.arms import BULK_ALONE
from bench.isolation.results.result import Result
from bench.isolation.summary import ArmSummary
from loadtest.estimates import client_warnings, failure_warnings
from loadtest.traffic.scenario import Targets


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
        Section(OVER_TIME, explanation="The first part of each mixed arm, one after another.", drawings=over_time)
        if over_time
        else None,
        Section("By class", tables.classes_table(result)),
        Section("Inside the engine", tables.engine_table(result.arms), explanation="From the server's own metrics."),
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
    return cards


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
