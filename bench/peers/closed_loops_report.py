"""The report of the closed loops: tokens per second, first tokens and gaps of each arm, and ratios to vLLM. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.isolation.goals import Goal
from bench.isolation.results.tables import goals_table
from bench.peers.arms import DEFAULT, FLEX, VLLM, ours_of
from bench.peers.closed_loops import NAME, LoopPart, Loops
from bench.peers.idle_servers import idle_facts, idle_warnings
from loadtest.checks.report import summary_as_dict
from loadtest.estimates import ClassSummary, Estimate, client_warnings, failure_warnings, summarize
from loadtest.reporting.formats import interval
from loadtest.reporting.latencies import ITL_P50, ITL_P99, TTFT_P50, TTFT_P99, cells_of, header_of
from loadtest.reporting.record import Record, Row, Section, Table

HOW = (
    "Each stream sends its requests one after another. The arms take turns, with prompts of the same lengths and other "
    "tokens. Tokens per second are the tokens of all answers ÷ the time until the last one has ended; behind them, in "
    "brackets, the lowest and the highest round. Ratios of first tokens have 95 % intervals."
)
LATENCIES = (TTFT_P50, TTFT_P99, ITL_P50, ITL_P99)


@dataclass(frozen=True, slots=True)
class LoopSummary:
    """One arm with one number of streams, over all rounds."""

    arm: str
    streams: int
    tokens_per_s: Estimate  # over all rounds; the bounds are the lowest and the highest round
    results: ClassSummary


@dataclass(frozen=True, slots=True)
class LoopRatios:
    """An arm divided by another arm with the same number of streams."""

    arm: str
    streams: int
    tokens_per_s: Estimate | None
    ttft_p50: Estimate | None
    ttft_p99: Estimate | None
    itl_p99: Estimate | None


def summarize_loops(parts: Sequence[LoopPart]) -> list[LoopSummary]:
    """Return a summary for each number of streams and each arm, in the order in which they were measured first."""
    groups: dict[tuple[int, str], list[LoopPart]] = {}
    for part in parts:
        groups.setdefault((part.streams, part.arm), []).append(part)
    return [_summarize(group) for group in groups.values()]


def _summarize(parts: Sequence[LoopPart]) -> LoopSummary:
    rates = [part.tokens_per_s for part in parts]
    tokens = sum(o.completion_tokens for part in parts for o in part.outcomes)
    mean = Estimate(tokens / sum(part.elapsed_s for part in parts), min(rates), max(rates))
    return LoopSummary(parts[0].arm, parts[0].streams, mean, summarize([part.run for part in parts], NAME))


def ratios_to(divisor: str, parts: Sequence[LoopPart], arms: Sequence[str]) -> list[LoopRatios]:
    """Return the ratios of each of `arms` to the arm `divisor`, for each number of streams that both have."""
    summaries = {(s.streams, s.arm): s for s in summarize_loops(parts)}
    return [
        _ratios(summaries[streams, arm], summaries[streams, divisor], parts)
        for streams in dict.fromkeys(streams for streams, _ in summaries)
        for arm in arms
        if {(streams, arm), (streams, divisor)} <= summaries.keys()
    ]


def _ratios(above: LoopSummary, below: LoopSummary, parts: Sequence[LoopPart]) -> LoopRatios:
    latencies = [latency.ratio(above.results, below.results) for latency in (TTFT_P50, TTFT_P99, ITL_P99)]
    return LoopRatios(above.arm, above.streams, _rate_ratio(parts, above, below), *latencies)


def _rate_ratio(parts: Sequence[LoopPart], above: LoopSummary, below: LoopSummary) -> Estimate | None:
    """Return the ratio of the tokens per second; its bounds are the lowest and the highest ratio within a round."""
    rates = {(p.arm, p.round_): p.tokens_per_s for p in parts if p.streams == above.streams}
    rounds = [
        rate / rates[below.arm, round_]
        for (arm, round_), rate in rates.items()
        if arm == above.arm and rates.get((below.arm, round_))
    ]
    if not rounds:
        return None
    return Estimate(above.tokens_per_s.value / below.tokens_per_s.value, min(rounds), max(rounds))


def loops_record(parts: Sequence[LoopPart], loops: Loops, arms: Sequence[str]) -> Record:
    summaries = summarize_loops(parts)
    goals = loop_goals(parts, arms)
    to_vllm = ratios_to(VLLM, parts, ours_of(arms))
    sections = [
        Section("Goals", goals_table(goals)) if goals else None,
        Section("Closed loops, times in ms", _summaries_table(summaries), explanation=HOW),
        Section("÷ vLLM", _ratios_table(to_vllm)) if to_vllm else None,
        Section("How it was run", facts=_facts(parts, loops)),
    ]
    return Record(
        "Closed loops over HTTP",
        sections=[section for section in sections if section is not None],
        data=_as_dict(parts, loops, summaries, to_vllm, goals),
        warnings=_warnings(parts, summaries),
        kicker="closed-loops",
    )


def loop_goals(parts: Sequence[LoopPart], arms: Sequence[str]) -> list[Goal]:
    """Return the goals, each with the worst ratio over all numbers of streams.

    A goal does not count if one of the requests behind it failed.
    """
    failed = {(s.streams, s.arm) for s in summarize_loops(parts) if s.results.errors}
    goals = []
    for arm in ours_of(arms) if VLLM in arms else ():
        found = ratios_to(VLLM, parts, [arm])
        counts = not any((r.streams, name) in failed for r in found for name in (arm, VLLM))
        tokens = Goal(f"{arm}: tokens/s ÷ vLLM", 1.0, 1.1, higher_is_better=True, counts=counts)
        p99 = Goal(f"{arm}: first token p99 ÷ vLLM", 1.2, 1.0, counts=counts)
        p50 = Goal(f"{arm}: first token p50 ÷ vLLM", 1.0, 1.0, counts=counts)
        goals.append(_worst(tokens, [(r.tokens_per_s, r.streams) for r in found]))
        goals.append(_worst(p99, [(r.ttft_p99, r.streams) for r in found]))
        goals.append(_worst(p50, [(r.ttft_p50, r.streams) for r in found]))
    if DEFAULT in arms and FLEX in arms:
        found = ratios_to(FLEX, parts, [DEFAULT])
        counts = not any((r.streams, name) in failed for r in found for name in (DEFAULT, FLEX))
        goal = Goal("default ÷ flex: tokens/s", 0.95, 0.95, higher_is_better=True, counts=counts)
        goals.append(_worst(goal, [(r.tokens_per_s, r.streams) for r in found]))
    return goals


def _worst(goal: Goal, ratios: Sequence[tuple[Estimate | None, int]]) -> Goal:
    """Return the goal with the worst ratio; each ratio comes with its number of streams."""
    measured = [(estimate, streams) for estimate, streams in ratios if estimate is not None]
    if not measured:
        return goal
    choose = min if goal.higher_is_better else max
    estimate, streams = choose(measured, key=lambda pair: pair[0].value)
    note = f"with {streams} streams, the worst of {len(measured)}"
    return replace(goal, measured=estimate, note=note if goal.counts else f"{note}; requests failed")


def _summaries_table(summaries: Sequence[LoopSummary]) -> Table:
    header = ("streams", "arm", "tokens/s", *header_of(LATENCIES), "requests", "errors")
    rows = (
        Row(
            (
                str(s.streams),
                s.arm,
                f"{s.tokens_per_s.value:.0f} ({s.tokens_per_s.low:.0f}–{s.tokens_per_s.high:.0f})",
                *cells_of(LATENCIES, s.results),
                str(s.results.offered),
                str(s.results.errors),
            ),
            "" if s.arm == VLLM else "ours",
        )
        for s in sorted(summaries, key=lambda s: s.streams)
    )
    return Table(header, tuple(rows))


def _ratios_table(ratios: Sequence[LoopRatios]) -> Table:
    header = ("streams", "arm", "tokens/s", "TTFT p50", "TTFT p99", "ITL p99")
    rows = (
        (str(r.streams), r.arm, *(interval(e) for e in (r.tokens_per_s, r.ttft_p50, r.ttft_p99, r.itl_p99)))
        for r in ratios
    )
    return Table.of(header, rows)


def _facts(parts: Sequence[LoopPart], loops: Loops) -> tuple[tuple[str, str], ...]:
    low, high = loops.prompt_tokens
    return (
        ("requests", f"{loops.requests_per_stream} a stream, prompts of {low}–{high}, {loops.new_tokens} new tokens"),
        ("rounds", str(loops.rounds)),
        *idle_facts([(p.arm, p.other_cores) for p in parts]),
    )


def _warnings(parts: Sequence[LoopPart], summaries: Sequence[LoopSummary]) -> list[str]:
    found = [w for s in summaries for w in failure_warnings(s.arm, {f"{s.streams} streams": s.results})]
    found += client_warnings(0.0, max(part.client_cores for part in parts))
    if not all(part.was_quiet for part in parts):
        found.append("a server still worked for the part before when a part began")
    return found + idle_warnings([(p.arm, p.other_cores) for p in parts])


def _as_dict(
    parts: Sequence[LoopPart],
    loops: Loops,
    summaries: Sequence[LoopSummary],
    to_vllm: Sequence[LoopRatios],
    goals: Sequence[Goal],
) -> dict[str, Any]:
    return {
        "load": asdict(loops),
        "summaries": [_summary_as_dict(s) for s in summaries],
        "ratios_to_vllm": [asdict(r) for r in to_vllm],
        "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in goals],
        "parts": [_part_as_dict(part) for part in parts],
    }


def _summary_as_dict(summary: LoopSummary) -> dict[str, Any]:
    rates = {"tokens_per_s": asdict(summary.tokens_per_s)}
    return summary_as_dict(summary.results) | {"arm": summary.arm, "streams": summary.streams} | rates


def _part_as_dict(part: LoopPart) -> dict[str, Any]:
    return {
        "arm": part.arm,
        "streams": part.streams,
        "round": part.round_,
        "elapsed_s": round(part.elapsed_s, 4),
        "tokens_per_s": round(part.tokens_per_s, 2),
        "client_cores": round(part.client_cores, 3),
        "other_cores": None if part.other_cores is None else round(part.other_cores, 3),
        "was_quiet": part.was_quiet,
        "ttft_s": [None if o.ttft_s is None else round(o.ttft_s, 5) for o in part.outcomes],
    }
