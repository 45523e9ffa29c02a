"""The report of the busy neighbour: first tokens of each arm before, during and after, and its goals. Pure."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.isolation.goals import Goal
from bench.isolation.tables import goals_table, milliseconds
from bench.peers.arms import VLLM
from bench.peers.idle_servers import idle_facts, idle_warnings
from bench.peers.neighbour import (
    NEW_TOKENS,
    NORMAL_RATIO,
    PROMPT_TOKENS,
    WINDOW_S,
    Neighbour,
    NeighbourPart,
    NeighbourSummary,
    summarize_neighbour,
)
from loadtest.checks.validity import client_warnings
from loadtest.client.answer import Outcome
from loadtest.estimates import Distribution, lag_p99_s
from loadtest.reporting.formats import ABSENT
from loadtest.reporting.record import Record, Row, Section, Table

FLOOR_S, GOAL_S = 1.0, 0.4  # seconds; first token p99 beside the busy loops
HOW = (
    "Chats arrive as a Poisson process, the same for every arm. A chat belongs to the phase in which it was due. "
    f"A server is back to normal with the first window of {WINDOW_S:g} s after the busy loops in which the first token "
    f"p99 is at most {NORMAL_RATIO:g} times that before them; the longest time of all rounds is shown."
)


def neighbour_record(parts: Sequence[NeighbourPart], load: Neighbour) -> Record:
    summaries = summarize_neighbour(parts)
    goals = neighbour_goals(summaries)
    other_cores = [(p.arm, p.other_cores) for p in parts]
    low, high = PROMPT_TOKENS
    facts = (
        ("load", f"{load.chats_per_s:.3g} chats/s, prompts of {low}–{high}, {NEW_TOKENS} new tokens"),
        ("phases", f"{load.before_s:g} s, {load.busy_s:g} s beside {load.loops} busy loops, {load.after_s:g} s"),
        ("rounds", str(load.rounds)),
        *idle_facts(other_cores),
    )
    return Record(
        f"Chats beside {load.loops} busy loops",
        sections=[
            *([Section("Goals", goals_table(goals))] if goals else []),
            Section("First tokens, times in ms", _table(summaries), explanation=HOW),
            Section("How it was run", facts=facts),
        ],
        data=_as_dict(parts, load, summaries, goals),
        warnings=_warnings(parts, summaries) + idle_warnings(other_cores),
        kicker="neighbour",
    )


def neighbour_goals(summaries: Sequence[NeighbourSummary]) -> list[Goal]:
    """Return one goal for each of our arms. It does not count if a chat failed."""
    goals = []
    for s in summaries:
        if s.arm == VLLM:
            continue
        note = f"of {len(s.during.samples)} chats" + (f"; {s.errors} failed" if s.errors else "")
        p99, name = s.during.quantile(0.99), f"{s.arm}: first token p99 beside the busy loops"
        goals.append(Goal(name, FLOOR_S, GOAL_S, p99, unit="s", note=note, counts=not s.errors))
    return goals


def _table(summaries: Sequence[NeighbourSummary]) -> Table:
    header = ("arm", "before p50", "p99", "during p50", "p99", "after p50", "p99", "normal after", "chats", "errors")
    rows = (
        Row(
            (
                s.arm,
                *(_ms(times, q) for times in (s.before, s.during, s.after) for q in (0.5, 0.99)),
                ABSENT if s.longest_recovery_s is None else f"{s.longest_recovery_s:g} s",
                str(s.offered),
                str(s.errors),
            ),
            "" if s.arm == VLLM else "ours",
        )
        for s in summaries
    )
    return Table(header, tuple(rows))


def _warnings(parts: Sequence[NeighbourPart], summaries: Sequence[NeighbourSummary]) -> list[str]:
    found = [
        f"{s.arm}: {s.errors} of {s.offered} chats failed ({'; '.join(s.error_examples)})"
        for s in summaries
        if s.errors
    ]
    runs = [part.run for part in parts]
    return found + client_warnings(lag_p99_s(runs), max(run.client_cpu_share for run in runs))


def _as_dict(
    parts: Sequence[NeighbourPart], load: Neighbour, summaries: Sequence[NeighbourSummary], goals: Sequence[Goal]
) -> dict[str, Any]:
    return {
        "load": asdict(load),
        "arms": {s.arm: _summary_as_dict(s) for s in summaries},
        "goals": [asdict(goal) | {"value": goal.value, "verdict": goal.verdict} for goal in goals],
        "parts": [_part_as_dict(part) for part in parts],
    }


def _summary_as_dict(summary: NeighbourSummary) -> dict[str, Any]:
    phases = {"before": summary.before, "during": summary.during, "after": summary.after}
    quantiles = {
        f"{phase}_ttft_{label}_s": estimate.value if (estimate := times.quantile(q)) else None
        for phase, times in phases.items()
        for label, q in (("p50", 0.5), ("p99", 0.99))
    }
    counts = {"offered": summary.offered, "errors": summary.errors, "error_examples": summary.error_examples}
    return quantiles | {"recovery_s": summary.recovery_s} | counts


def _part_as_dict(part: NeighbourPart) -> dict[str, Any]:
    start_s = part.run.start_s
    return {
        "arm": part.arm,
        "round": part.round_,
        "neighbour_from_s": round(part.began_s - start_s, 3),
        "neighbour_to_s": round(part.ended_s - start_s, 3),
        "other_cores": part.other_cores,
        "chats": [_chat_as_dict(outcome, start_s) for outcome in part.chats],
    }


def _chat_as_dict(outcome: Outcome, start_s: float) -> dict[str, Any]:
    ttft_s, e2e_s = (None if s is None else round(s, 5) for s in (outcome.ttft_s, outcome.e2e_s))
    return {"due_s": round(outcome.due_s - start_s, 4), "ttft_s": ttft_s, "e2e_s": e2e_s, "error": outcome.error}


def _ms(distribution: Distribution, q: float) -> str:
    estimate = distribution.quantile(q)
    return milliseconds(estimate.value if estimate else None)
