"""Results as tables for people and JSON for programs, with what is needed to run them again.

Knows how results look; it computes nothing that is not a unit or a rounding.
"""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.checks.mixed import MixedResult
from loadtest.checks.nonce import NonceResult
from loadtest.checks.streams import StreamsResult, Throughput
from loadtest.estimates import QUANTILES, ClassSummary, Distribution, Estimate
from loadtest.machine import hardware

ABSENT = "–"
MAX_WRONG_SHOWN = 10  # the JSON has them all


def render_mixed(result: MixedResult) -> str:
    parts = [_mixed_table(result), "", "interactive beside bulk ÷ alone (95 % interval)"]
    header = ("class", "TTFT p50", "TTFT p99", "ITL p99", "E2E p50")
    rows = [
        (name, *(interval(e) for e in (i.ttft_p50, i.ttft_p99, i.itl_p99, i.e2e_p50)))
        for name, i in result.isolation.items()
    ]
    parts += [table(header, rows), ""]
    parts.append(f"bulk kept, mixed ÷ alone: {number(result.bulk_kept)}")
    parts.append(f"bulk harvest, of what interactive leaves: {number(result.bulk_harvest)}")
    lag_ms = 1e3 * result.lag_p99_s
    parts.append(f"client: {result.client_cpu_share:.0%} of a core, requests sent {lag_ms:.1f} ms late (p99)")
    parts += [f"WARNING: {warning}" for warning in result.warnings]
    return "\n".join(parts)


def _mixed_table(result: MixedResult) -> str:
    counts = ("offered", "done", "unfinished", "errors")
    times = ("TTFT p50", "p95", "p99", "ITL p50", "p99", "max", "E2E p50")
    header = ("arm", "class", "answered as", *counts, *times, "tok/s")
    rows = [
        (arm, name, *_class_cells(summary))
        for arm, classes in result.summaries.items()
        for name, summary in classes.items()
    ]
    return "times in ms\n" + table(header, rows)


def _class_cells(summary: ClassSummary) -> tuple[str, ...]:
    longest = summary.itl.max
    return (
        ", ".join(summary.answered_as) or ABSENT,
        str(summary.offered),
        str(summary.completed),
        str(summary.unfinished),
        str(summary.errors),
        *(_ms(summary.ttft.quantile(q)) for q in QUANTILES),
        *(_ms(summary.itl.quantile(q)) for q in (0.5, 0.99)),
        ABSENT if longest is None else f"{1e3 * longest:.0f}",
        _ms(summary.e2e.quantile(0.5)),
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


def render_nonces(result: NonceResult) -> str:
    rows = [
        (tier, str(result.right.get(tier, 0)), ", ".join(named) or ABSENT) for tier, named in result.answered_as.items()
    ]
    lines = [table(("service_tier", "right", "answered as"), rows)]
    lines += [
        f"WRONG ({w.service_tier}, {'streamed' if w.streamed else 'plain'}): {w.nonce} → {w.answer!r}: {w.problem}"
        for w in result.wrong[:MAX_WRONG_SHOWN]
    ]
    wrong = f"{len(result.wrong)} WRONG answers, {result.leaks} with another request's nonce"
    verdict = "every answer is its own nonce" if result.passed else wrong
    return "\n".join([*lines, f"{sum(result.right.values())} of {result.requests} right: {verdict}"])


def nonces_as_dict(result: NonceResult) -> dict[str, Any]:
    return asdict(result) | {"passed": result.passed, "leaks": result.leaks}


def render_streams(result: StreamsResult) -> str:
    rows = [
        _throughput_cells(f"{result.streams} at once", result.together),
        _throughput_cells("one at a time", result.one_at_a_time),
    ]
    lines = [table(("way", "requests", "errors", "tokens", "seconds", "tok/s"), rows)]
    lines += [f"ERROR: {example}" for example in result.error_examples]
    return "\n".join([*lines, f"ratio: {number(result.speedup)}"])


def _throughput_cells(way: str, t: Throughput) -> tuple[str, ...]:
    return (way, str(t.requests), str(t.errors), str(t.tokens), f"{t.elapsed_s:.1f}", f"{t.tokens_per_s:.1f}")


def streams_as_dict(result: StreamsResult) -> dict[str, Any]:
    ways = {"together": result.together, "one_at_a_time": result.one_at_a_time}
    return {
        "streams": result.streams,
        **{name: asdict(t) | {"tokens_per_s": t.tokens_per_s} for name, t in ways.items()},
        "speedup": result.speedup,
        "error_examples": result.error_examples,
    }


def write_json(path: Path, result: dict[str, Any], *, seed: int, model: str) -> None:
    """The result with its provenance."""
    record = {
        "command": shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "model": model,
        "seed": seed,
        **result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their longest cell; numbers to the right, words to the left."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    is_word = [any(line[i][:1].isalpha() for line in lines[1:]) for i in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        cells = zip(line, widths, is_word, strict=True)
        return "  ".join(c.ljust(w) if word else c.rjust(w) for c, w, word in cells).rstrip()

    rule = "  ".join("─" * w for w in widths)
    return "\n".join([aligned(lines[0]), rule, *(aligned(line) for line in lines[1:])])


def _ms(estimate: Estimate | None) -> str:
    return ABSENT if estimate is None else f"{1e3 * estimate.value:.0f}"


def interval(estimate: Estimate | None) -> str:
    return ABSENT if estimate is None else f"{estimate.value:.2f} ({estimate.low:.2f}–{estimate.high:.2f})"


def number(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}"
