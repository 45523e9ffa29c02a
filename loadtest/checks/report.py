"""The records of the checks: the content of their tables and of their JSON.

Knows units and names; computes nothing else.
"""

from dataclasses import asdict
from typing import Any

from loadtest.checks.mixed import MixedResult
from loadtest.checks.nonce import NonceResult
from loadtest.estimates import QUANTILES, ClassSummary, Distribution
from loadtest.reporting.formats import ABSENT, interval, number
from loadtest.reporting.latencies import ARM_LATENCIES, cells_of, header_of
from loadtest.reporting.record import Provenance, Record, Section, Table

MAX_WRONG_SHOWN = 10  # wrong answers printed as text; the JSON has all of them


def mixed_record(result: MixedResult, scenario: dict[str, Any], provenance: Provenance) -> Record:
    return Record(
        sections=[
            Section("times in ms", _arms_table(result)),
            Section("interactive beside bulk ÷ alone (95 % interval)", _isolation_table(result)),
            Section(notes=_mixed_notes(result)),
        ],
        data={"scenario": scenario, **mixed_as_dict(result)},
        provenance=provenance,
        warnings=result.warnings,
    )


def _arms_table(result: MixedResult) -> Table:
    counts = ("offered", "done", "unfinished", "errors")
    rows = [
        (arm, name, *_class_cells(summary))
        for arm, classes in result.summaries.items()
        for name, summary in classes.items()
    ]
    return Table.of(("arm", "class", "answered as", *counts, *header_of(ARM_LATENCIES), "tok/s"), rows)


def _isolation_table(result: MixedResult) -> Table:
    rows = [
        (name, *(interval(e) for e in (i.ttft_p50, i.ttft_p99, i.itl_p99, i.e2e_p50)))
        for name, i in result.isolation.items()
    ]
    return Table.of(("class", "TTFT p50", "TTFT p99", "ITL p99", "E2E p50"), rows)


def _mixed_notes(result: MixedResult) -> tuple[str, ...]:
    lag_ms = 1e3 * result.lag_p99_s
    return (
        f"bulk kept, mixed ÷ alone: {number(result.bulk_kept)}",
        f"bulk harvest, of what interactive leaves: {number(result.bulk_harvest)}",
        f"client: {result.client_cpu_share:.0%} of a core, requests sent {lag_ms:.1f} ms late (p99)",
    )


def _class_cells(summary: ClassSummary) -> tuple[str, ...]:
    return (
        ", ".join(summary.answered_as) or ABSENT,
        str(summary.offered),
        str(summary.completed),
        str(summary.unfinished),
        str(summary.errors),
        *cells_of(ARM_LATENCIES, summary),
        f"{summary.tokens_per_s:.1f}",
    )


def mixed_as_dict(result: MixedResult) -> dict[str, Any]:
    return {
        "arms": {
            arm: {name: summary_as_dict(summary) for name, summary in classes.items()}
            for arm, classes in result.summaries.items()
        },
        "isolation": {name: asdict(isolation) for name, isolation in result.isolation.items()},
        "bulk_kept": result.bulk_kept,
        "bulk_harvest": result.bulk_harvest,
        "engine_busy_share": result.busy_share,
        "client": {"lag_p99_s": result.lag_p99_s, "cpu_share": result.client_cpu_share},
        "warnings": result.warnings,
    }


def summary_as_dict(summary: ClassSummary) -> dict[str, Any]:
    return {
        "offered": summary.offered,
        "completed": summary.completed,
        "errors": summary.errors,
        "unfinished": summary.unfinished,
        "tokens_per_s": summary.tokens_per_s,
        "answered_as": summary.answered_as,
        "error_examples": summary.error_examples,
        "ttft_s": _quantiles_as_dict(summary.ttft),
        "itl_s": _quantiles_as_dict(summary.itl),
        "e2e_s": _quantiles_as_dict(summary.e2e),
    }


def _quantiles_as_dict(distribution: Distribution) -> dict[str, Any]:
    estimates = {f"p{100 * q:g}": distribution.quantile(q) for q in QUANTILES}
    named: dict[str, Any] = {name: asdict(e) if e else None for name, e in estimates.items()}
    return named | {"max": distribution.max, "samples": len(distribution.samples)}


def nonce_record(result: NonceResult, provenance: Provenance) -> Record:
    rows = [
        (tier, str(result.right.get(tier, 0)), ", ".join(named) or ABSENT) for tier, named in result.answered_as.items()
    ]
    wrong = [
        f"WRONG ({w.service_tier}, {'streamed' if w.streamed else 'plain'}): {w.nonce} → {w.answer!r}: {w.problem}"
        for w in result.wrong[:MAX_WRONG_SHOWN]
    ]
    table = Table.of(("service_tier", "right", "answered as"), rows)
    return Record(
        sections=[Section(table=table, notes=(*wrong, _verdict(result)))],
        data=asdict(result) | {"passed": result.passed, "leaks": result.leaks},
        provenance=provenance,
    )


def _verdict(result: NonceResult) -> str:
    wrong = f"{len(result.wrong)} WRONG answers, {result.leaks} with another request's nonce"
    verdict = "every answer is its own nonce" if result.passed else wrong
    return f"{sum(result.right.values())} of {result.requests} right: {verdict}"
