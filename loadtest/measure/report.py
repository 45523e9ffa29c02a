"""The record of a measurement: its tables, cards and warnings, and the content of its JSON.

Knows units and names; computes only ratios. Arms stand side by side, one column each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from textwrap import shorten
from typing import Any

from loadtest.checks.report import summary_as_dict
from loadtest.client.runner import ArmRun
from loadtest.estimates import client_warnings, lag_p99_s
from loadtest.measure.figures import ClassFigures, Figures, ends_late, figures_of, token_rate
from loadtest.measure.rounds import BATCHED, WITH_TIERS, Measurement
from loadtest.reporting.formats import ABSENT, number
from loadtest.reporting.latencies import (
    E2E_P50,
    E2E_P99,
    ITL_P50,
    ITL_P99,
    TTFT_P50,
    TTFT_P95,
    TTFT_P99,
    Latency,
)
from loadtest.reporting.record import Card, Drawing, Provenance, Record, Section, Table
from loadtest.traffic.scenario_arrivals import ClosedLoop

MAX_EXAMPLE = 80  # characters of an error that the table shows; the JSON has it whole
TITLES = {BATCHED: "Batched against one at a time", WITH_TIERS: "With tiers against without"}
# Rows of the tables. E2E is also known of answers that are not streamed.
LATENCIES = (TTFT_P50, TTFT_P95, TTFT_P99, ITL_P50, ITL_P99, E2E_P50, E2E_P99)


def load_record(
    measurement: Measurement,
    options: Mapping[str, Any],
    provenance: Provenance,
    drawings: Callable[[Measurement, Figures], Sequence[Sequence[Drawing]]] | None = None,
) -> Record:
    """Return the record of a measurement in which at least one arm was measured.

    `drawings` makes the plots of latencies and those over time; without it, the record has none.
    """
    figures = figures_of(measurement)
    latencies, over_time = drawings(measurement, figures) if drawings else ((), ())
    problems = _problems_table(figures)
    sections = [
        *_tables(measurement, figures),
        Section("Latencies", drawings=tuple(latencies)) if latencies else None,
        Section("Over time", drawings=tuple(over_time)) if over_time else None,
        Section("Errors", problems) if problems.rows else None,
        Section("The load", facts=_facts(measurement, figures)),
    ]
    return Record(
        title=_title(measurement),
        sections=[section for section in sections if section],
        data={"options": dict(options), **measurement_as_dict(measurement, figures)},
        provenance=provenance,
        warnings=_warnings(measurement, figures),
        cards=_cards(figures),
        kicker="load test",
    )


def tokens_ratio(figures: Figures) -> float | None:
    """Return the output tokens a second of the first arm ÷ those of the second; None if there is no such ratio."""
    rates = [sum(f.summary.tokens_per_s for f in classes.values()) for classes in figures.values()]
    return rates[0] / rates[1] if len(rates) == 2 and rates[1] else None


def _title(measurement: Measurement) -> str:
    first = measurement.arms[0]
    return TITLES.get(first.name, "Load test") + ": " + ", ".join(_load_of(c) for c in first.classes)


def _load_of(traffic: Any) -> str:
    if isinstance(traffic.arrivals, ClosedLoop):
        return f"{traffic.arrivals.streams} {traffic.name} users"
    return f"{traffic.arrivals.mean_rate_per_s:g} {traffic.name} requests/s"


def _tables(measurement: Measurement, figures: Figures) -> list[Section]:
    """Return a table for each class with a column for each arm, or one table with a column for each class."""
    if len(figures) == 1:
        [classes] = figures.values()
        return [Section("Times in ms", _table(classes))]
    names = [c.name for c in measurement.arms[0].classes]
    title = "{}, times in ms" if len(names) > 1 else "Times in ms"
    return [
        Section(title.format(name), _table({arm: classes[name] for arm, classes in figures.items()}, is_compared=True))
        for name in names
    ]


def _table(columns: Mapping[str, ClassFigures], is_compared: bool = False) -> Table:
    every = list(columns.values())
    rows: list[list[str]] = [
        ["requests finished", *(str(f.summary.completed) for f in every)],
        ["errors", *(str(f.summary.errors) for f in every)],
        ["without an end", *(str(f.summary.unfinished) for f in every)],
        ["requests/s", *(number(f.requests_per_s) for f in every)],
        ["output tokens/s", *(number(f.summary.tokens_per_s, 1) for f in every)],
        *([latency.name, *(_latency_cell(latency, f) for f in every)] for latency in LATENCIES),
    ]
    if is_compared:
        for row, cell in zip(rows, _ratios(every[0], every[1]), strict=True):
            row.append(cell)
    return Table.of(("", *columns, *(["ratio"] if is_compared else [])), rows)


def _latency_cell(latency: Latency, f: ClassFigures) -> str:
    return latency.cell(f.summary) if f.is_streamed or latency.of == "e2e" else ABSENT


def _ratios(above: ClassFigures, below: ClassFigures) -> list[str]:
    """Return a cell for each row: rates without an interval, latencies with their 95 % interval."""
    rates = [(above.requests_per_s, below.requests_per_s), (above.summary.tokens_per_s, below.summary.tokens_per_s)]
    is_streamed = above.is_streamed and below.is_streamed
    return [
        *[""] * 3,
        *(number(a / b if b else None) for a, b in rates),
        *(
            latency.ratio_cell(above.summary, below.summary) if is_streamed or latency.of == "e2e" else ABSENT
            for latency in LATENCIES
        ),
    ]


def _problems_table(figures: Figures) -> Table:
    rows = [
        (arm, name, problem.kind, str(problem.count), shorten(problem.example, MAX_EXAMPLE, placeholder=" …"))
        for arm, classes in figures.items()
        for name, f in classes.items()
        for problem in f.problems
    ]
    table = Table.of(("arm", "class", "error", "requests", "example"), rows)
    return Table(table.header, table.rows, note_columns=(4,))


def _facts(measurement: Measurement, figures: Figures) -> tuple[tuple[str, str], ...]:
    arm = measurement.measured[0]
    facts = []
    for traffic in arm.classes:
        of_class = figures[arm.name][traffic.name]
        lengths = (
            f"{number(of_class.mean_prompt_tokens, 0)} + {number(of_class.mean_output_tokens, 0)} tokens on average"
        )
        tier = f", service_tier {traffic.service_tier}" if traffic.service_tier else ""
        how = "streamed" if traffic.stream else "whole answers"
        facts.append((traffic.name, f"{_load_of(traffic)}, {lengths}, {traffic.endpoint}, {how}{tier}"))
    seconds = ", ".join(
        f"{a.name} {sum(run.duration_s for run in measurement.runs[a.name]):.1f} s" for a in measurement.measured
    )
    return (*facts, ("measured", f"{seconds}; parts take turns" if len(measurement.arms) > 1 else seconds))


def _warnings(measurement: Measurement, figures: Figures) -> list[str]:
    found = []
    if measurement.was_interrupted:
        found.append("the measurement was interrupted; these are the figures until then")
    every_run = [run for runs in measurement.runs.values() for run in runs]
    found += client_warnings(lag_p99_s(every_run), max(run.client_cpu_share for run in every_run))
    for arm in measurement.measured:
        found += ends_late(arm, figures[arm.name])
        for name, f in figures[arm.name].items():
            if f.summary.errors:
                kinds = ", ".join(f"{p.count} × {p.kind}" for p in f.problems)
                found.append(f"{arm.name}, {name}: {f.summary.errors} of {f.summary.offered} failed: {kinds}")
    return found


def _cards(figures: Figures) -> list[Card]:
    """Return the figures that answer the question of the measurement: ratios, or rates and the first token."""
    arms = list(figures)
    name = next(iter(figures[arms[0]]))
    firsts = [classes[name] for classes in figures.values()]
    noticed = TTFT_P99 if firsts[0].is_streamed else E2E_P99  # what a user notices first
    cards = []
    if len(arms) == 2:
        quotient = f"{arms[0]} ÷ {arms[1]}"
        times = noticed.ratio(firsts[0].summary, firsts[1].summary)
        cards.append(Card(f"{number(tokens_ratio(figures))} ×", f"output tokens a second, {quotient}"))
        cards.append(Card(f"{number(times.value if times else None)} ×", f"{name} {noticed.name}, {quotient}"))
    for arm, f in zip(arms, firsts, strict=True):
        estimate = noticed.distribution(f.summary).quantile(0.99)
        of_arm = f", {arm}" if len(arms) == 2 else ""
        cards.append(Card(_with_unit(estimate.value if estimate else None), f"{name} {noticed.name}{of_arm}"))
    if len(arms) == 1:
        every = list(figures[arms[0]].values())
        cards.append(Card(f"{sum(f.requests_per_s for f in every):,.1f}", "requests a second"))
        cards.append(Card(f"{sum(f.summary.tokens_per_s for f in every):,.0f}", "output tokens a second"))
        cards.append(Card(str(sum(f.summary.errors for f in every)), "errors"))
    return cards


def _with_unit(seconds: float | None) -> str:
    if seconds is None:
        return ABSENT
    return f"{1000 * seconds:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def measurement_as_dict(measurement: Measurement, figures: Figures) -> dict[str, Any]:
    return {
        "arms": {
            arm: {
                name: summary_as_dict(f.summary)
                | {
                    "streamed": f.is_streamed,
                    "requests_per_s": f.requests_per_s,
                    "mean_prompt_tokens": f.mean_prompt_tokens,
                    "mean_output_tokens": f.mean_output_tokens,
                    "problems": [asdict(p) for p in f.problems],
                }
                for name, f in classes.items()
            }
            for arm, classes in figures.items()
        },
        "tokens_per_s_ratio": tokens_ratio(figures),
        "parts": [
            _part_as_dict(measurement, arm.name, run)
            for arm in measurement.measured
            for run in measurement.runs[arm.name]
        ],
        "interrupted": measurement.was_interrupted,
    }


def _part_as_dict(measurement: Measurement, arm: str, run: ArmRun) -> dict[str, Any]:
    """Return when a part was measured, in seconds since the first, and its tokens a second over time."""
    return {
        "arm": arm,
        "start_s": run.start_s - measurement.start_s,
        "duration_s": run.duration_s,
        "client_cpu_share": run.client_cpu_share,
        "tokens_per_s": {name: [round(rate, 3) for rate in token_rate(run, name)[1].tolist()] for name in run.outcomes},
    }
