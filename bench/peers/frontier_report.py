"""The report of the frontier: its points, all arms, and the goals."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from bench.isolation.goals import Goal
from bench.isolation.results.record import BULK_NOISE, arm_warnings
from bench.isolation.results.result import requests_of
from bench.isolation.results.tables import arms_table, goals_table
from bench.isolation.summary import ArmSummary
from bench.peers.frontier import HARVEST_GOALS, FrontierRun, Point, frontier_goals, points_of
from bench.peers.idle_servers import idle_facts, idle_warnings
from loadtest.checks.report import summary_as_dict
from loadtest.client.runner import Timing
from loadtest.reporting.formats import interval, number, percent
from loadtest.reporting.record import Drawing, Record, Row, Section, Table
from loadtest.traffic.scenario import Scenario, Targets

HOW = (
    "Latencies are ÷ those of the same system without bulk. Harvest is bulk's tokens per second ÷ its unlimited rate "
    "on the same system with nobody else there. The goals read the harvest off the line through our points."
)
POINTS = "Harvest against slowdown"
Latency = Literal["e2e_p50", "ttft_p99"]  # fields of `LatencyRatios`


def frontier_record(
    run: FrontierRun,
    arms: dict[str, ArmSummary],
    scenario: Scenario,
    timing: Timing,
    slos: Mapping[str, Targets],
    drawings: tuple[Drawing, ...] = (),
) -> Record:
    points = points_of(arms)
    goals = frontier_goals(arms, points)
    facts = (
        ("measured", f"{timing.duration_s:g} s of each arm, in {timing.rounds} parts"),
        ("scenario", scenario.description or "a file"),
        *idle_facts(run.other_cores),
    )
    return Record(
        "Bulk harvest against the slowdown of interactive traffic",
        sections=(
            Section("Goals", goals_table(goals)),
            Section(POINTS, _points_table(points), explanation=HOW, drawings=drawings),
            Section("The arms, times in ms", arms_table(arms)),
            Section("How it was run", facts=facts),
        ),
        data=_as_dict(run, arms, points, goals, scenario, timing, slos),
        warnings=_warnings(run, arms, points),
        kicker="frontier",
    )


def _warnings(run: FrontierRun, arms: dict[str, ArmSummary], points: Sequence[Point]) -> list[str]:
    found = [warning for arm in arms.values() for warning in arm_warnings(arm)]
    too_much = [p.name for p in points if p.harvest is not None and p.harvest > BULK_NOISE]
    if too_much:
        found.append(
            f"Bulk got more in {', '.join(too_much)} than with nobody else there: a run too short, or a machine that "
            "others use. Harvest says too much."
        )
    return found + idle_warnings(run.other_cores)


def _points_table(points: Sequence[Point]) -> Table:
    header = ("arm", "E2E p50 ÷ alone", "TTFT p50 ÷ alone", "TTFT p99 ÷ alone", "in time", "bulk tok/s", "harvest")
    rows = (
        Row(
            (
                p.name,
                *(interval(e) for e in (p.latency.e2e_p50, p.latency.ttft_p50, p.latency.ttft_p99)),
                percent(p.attainment),
                f"{p.bulk_tokens_per_s:.0f}",
                number(p.harvest),
            ),
            "ours" if p.is_ours else "",
        )
        for p in points
    )
    return Table(header, tuple(rows))


def _as_dict(
    run: FrontierRun,
    arms: dict[str, ArmSummary],
    points: Sequence[Point],
    goals: Sequence[Goal],
    scenario: Scenario,
    timing: Timing,
    slos: Mapping[str, Targets],
) -> dict[str, Any]:
    return {
        "scenario": scenario.model_dump(mode="json"),
        "timing": asdict(timing),
        "slos": {name: targets.model_dump() for name, targets in slos.items()},
        "points": [asdict(point) | {"slowdown": point.slowdown} for point in points],
        "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in goals],
        "arms": {name: _arm_as_dict(summary) for name, summary in arms.items()},
        "other_cores": run.other_cores,
        "requests": requests_of(run.rounds, slos),
    }


def _arm_as_dict(summary: ArmSummary) -> dict[str, Any]:
    return {
        "tiers": summary.arm.tiers,
        "classes": {name: summary_as_dict(c) for name, c in summary.classes.items()},
        "attainment": summary.total.share,
        "bulk_tokens_per_s": summary.bulk_tokens_per_s,
        "engine": asdict(summary.engine),
    }


def draw_frontier(points: Sequence[Point]) -> tuple[Drawing, ...]:
    """Return two plots: harvest against the slowdown of whole answers, with its goals, and of first tokens."""
    from loadtest.measure.plots import TradeOff, trade_off_drawing  # imports matplotlib

    def drawing(title: str, label: str, latency: Latency, goals: Sequence[tuple[float, float]] = ()) -> Drawing:
        shown = [
            TradeOff(p.name.removeprefix("max_slowdown "), e.value, p.harvest, p.is_ours)
            for p in points
            if (e := getattr(p.latency, latency)) is not None and p.harvest is not None
        ]
        return trade_off_drawing(title, (label, "bulk tokens/s ÷ unlimited"), shown, goals=goals, is_log=True)

    goals = [(slowdown, goal) for slowdown, (_, goal) in HARVEST_GOALS.items()]
    return (
        drawing("Whole answers", "E2E p50 ÷ alone", "e2e_p50", goals),
        drawing("First tokens", "TTFT p99 ÷ alone", "ttft_p99"),
    )
