"""The report of the closed loops: tokens per second, first tokens and gaps of each arm, and ratios to vLLM. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.isolation.goals import Goal
from bench.isolation.tables import goals_table, milliseconds
from bench.peers.arms import DEFAULT, FLEX, VLLM, ours_of
from bench.peers.closed_loops import LoopPart, Loops
from bench.peers.idle_servers import idle_facts, idle_warnings
from loadtest.estimates import Distribution, Estimate, client_warnings, ratio
from loadtest.reporting.formats import interval
from loadtest.reporting.record import Record, Row, Section, Table

HOW = (
    "Each stream sends its requests one after another. The arms take turns, with prompts of the same lengths and other "
    "tokens. Tokens per second are the tokens of all answers ÷ the time until the last one has ended; behind them, in "
    "brackets, the lowest and the highest round. Ratios of first tokens have 95 % intervals."
)


@dataclass(frozen=True, slots=True)
class LoopSummary:
    """One arm with one number of streams, over all rounds."""

    arm: str
    streams: int
    tokens_per_s: Estimate  # over all rounds; the bounds are the lowest and the highest round
    ttft: Distribution
    itl: Distribution
    requests: int
    errors: int
    error_examples: tuple[str, ...]


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
    outcomes = [o for part in parts for o in part.outcomes]
    rates = [part.tokens_per_s for part in parts]
    errors = [o.error for o in outcomes if o.error is not None]
    tokens = sum(o.completion_tokens for o in outcomes)
    return LoopSummary(
        parts[0].arm,
        parts[0].streams,
        Estimate(tokens / sum(part.elapsed_s for part in parts), min(rates), max(rates)),
        Distribution(np.array([o.ttft_s for o in outcomes if o.ttft_s is not None])),
        Distribution(np.array([gap for o in outcomes for gap in o.inter_token_s()])),
        len(outcomes),
        len(errors),
        tuple(sorted(set(errors)))[:3],
    )


def ratios_to(divisor: str, parts: Sequence[LoopPart], arms: Sequence[str]) -> list[LoopRatios]:
    """Return the ratios of each of `arms` to the arm `divisor`, for each number of streams that both have."""
    summaries = {(s.streams, s.arm): s for s in summarize_loops(parts)}
    found = []
    for streams in dict.fromkeys(streams for streams, _ in summaries):
        for arm in arms:
            above, below = summaries.get((streams, arm)), summaries.get((streams, divisor))
            if above is not None and below is not None:
                found.append(_ratios(above, below, _rate_ratio(parts, above, below)))
    return found


def _ratios(above: LoopSummary, below: LoopSummary, tokens_per_s: Estimate | None) -> LoopRatios:
    return LoopRatios(
        above.arm,
        above.streams,
        tokens_per_s,
        ttft_p50=ratio(above.ttft, below.ttft, 0.5),
        ttft_p99=ratio(above.ttft, below.ttft, 0.99),
        itl_p99=ratio(above.itl, below.itl, 0.99),
    )


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
    failed = {(s.streams, s.arm) for s in summarize_loops(parts) if s.errors}
    goals = []
    if VLLM in arms:
        for arm in ours_of(arms):
            found = [r for r in ratios_to(VLLM, parts, [arm])]
            counts = not any((r.streams, name) in failed for r in found for name in (arm, VLLM))
            for goal, value in (
                (Goal(f"{arm}: tokens/s ÷ vLLM", 1.0, 1.1, higher_is_better=True, counts=counts), _tokens_per_s),
                (Goal(f"{arm}: first token p99 ÷ vLLM", 1.2, 1.0, counts=counts), _ttft_p99),
                (Goal(f"{arm}: first token p50 ÷ vLLM", 1.0, 1.0, counts=counts), _ttft_p50),
            ):
                goals.append(_worst(goal, found, value))
    if DEFAULT in arms and FLEX in arms:
        found = ratios_to(FLEX, parts, [DEFAULT])
        counts = not any((r.streams, name) in failed for r in found for name in (DEFAULT, FLEX))
        goal = Goal("default ÷ flex: tokens/s", 0.95, 0.95, higher_is_better=True, counts=counts)
        goals.append(_worst(goal, found, _tokens_per_s))
    return goals


def _tokens_per_s(ratios: LoopRatios) -> Estimate | None:
    return ratios.tokens_per_s


def _ttft_p50(ratios: LoopRatios) -> Estimate | None:
    return ratios.ttft_p50


def _ttft_p99(ratios: LoopRatios) -> Estimate | None:
    return ratios.ttft_p99


def _worst(goal: Goal, found: Sequence[LoopRatios], value: Callable[[LoopRatios], Estimate | None]) -> Goal:
    measured = [(estimate, r.streams) for r in found if (estimate := value(r)) is not None]
    if not measured:
        return goal
    choose = min if goal.higher_is_better else max
    estimate, streams = choose(measured, key=lambda pair: pair[0].value)
    note = f"with {streams} streams, the worst of {len(measured)}"
    if not goal.counts:
        note += "; requests failed"
    return Goal(goal.name, goal.target, goal.goal, estimate, goal.higher_is_better, note=note, counts=goal.counts)


def _summaries_table(summaries: Sequence[LoopSummary]) -> Table:
    header = ("streams", "arm", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "requests", "errors")
    rows = (
        Row(
            (
                str(s.streams),
                s.arm,
                f"{s.tokens_per_s.value:.0f} ({s.tokens_per_s.low:.0f}–{s.tokens_per_s.high:.0f})",
                *(_ms(s.ttft, q) for q in (0.5, 0.99)),
                *(_ms(s.itl, q) for q in (0.5, 0.99)),
                str(s.requests),
                str(s.errors),
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
    found = [
        f"{s.arm}, {s.streams} streams: {s.errors} of {s.requests} requests failed ({'; '.join(s.error_examples)})"
        for s in summaries
        if s.errors
    ]
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
    quantiles = {
        f"{name}_{label}_s": estimate.value if (estimate := times.quantile(q)) else None
        for name, times in (("ttft", summary.ttft), ("itl", summary.itl))
        for label, q in (("p50", 0.5), ("p99", 0.99))
    }
    return {
        "arm": summary.arm,
        "streams": summary.streams,
        "tokens_per_s": asdict(summary.tokens_per_s),
        **quantiles,
        "requests": summary.requests,
        "errors": summary.errors,
        "error_examples": summary.error_examples,
    }


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


def _ms(distribution: Distribution, q: float) -> str:
    estimate = distribution.quantile(q)
    return milliseconds(estimate.value if estimate else None)
