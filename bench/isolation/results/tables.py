"""The tables of an experiment. Knows units and rounding; computes nothing else."""

from collections.abc import Mapping

from bench.isolation.arms import OURS
from bench.isolation.controls import Control
from bench.isolation.experiments import has_deadline
from bench.isolation.goals import Goal
from bench.isolation.tuning import Goodput
from bench.isolation.results.result import Result
from bench.isolation.summary import ArmSummary, compare_all
from loadtest.estimates import Estimate
from loadtest.reporting.formats import ABSENT, interval, milliseconds, number, percent
from loadtest.reporting.latencies import ARM_LATENCIES, TTFT_P50, TTFT_P99, cells_of, header_of
from loadtest.reporting.record import Row, Table
from loadtest.traffic.scenario_arrivals import OpenLoop

DIRECTION = {False: "≤", True: "≥"}


def load_line(result: Result) -> str:
    """Return one line of text about the load of the interactive classes."""
    rates = [
        f"{c.name} {c.arrivals.mean_rate_per_s:.3g}/s"
        for c in result.scenario.with_role("interactive")
        if isinstance(c.arrivals, OpenLoop)
    ]
    factor, unit = result.experiment.profile.factor, f"× {result.clients:.3g} clients, as given (--clients)"
    if result.goodput is not None:
        unit = "of the solo goodput" if result.goodput.clients else "of the least load that was tried alone"
    moved = f", then {factor:g} times that" if factor != 1.0 else ""
    return f"{result.load:g} {unit}{moved}; mean arrivals before: {', '.join(rates)}"


def goodput_line(goodput: Goodput) -> str:
    """Return one line of text about the solo goodput."""
    if not goodput.clients:
        return "none of the loads that were tried held"
    above = "nothing above it was tried" if goodput.breaks_at is None else f"{goodput.breaks_at:.3g} × did not hold"
    sure = "" if goodput.at_least is None else f"; at least {goodput.at_least:.0%} in time there, at 95 % confidence"
    return f"{goodput.clients:.3g} × the scenario's load ({above}{sure})"


def arms_table(arms: Mapping[str, ArmSummary]) -> Table:
    """Return a table with a row for each arm. Times are in ms."""
    header = ("arm", "", "offered", "in time", *header_of(ARM_LATENCIES), "bulk tok/s", "engine busy")
    return Table(header, tuple(Row(_arm_cells(arm), _mark(arm)) for arm in arms.values()))


def _arm_cells(arm: ArmSummary) -> tuple[str, ...]:
    return (
        arm.arm.name,
        arm.arm.title,
        str(arm.total.offered) if arm.attainment else ABSENT,
        percent(arm.total.share),
        *cells_of(ARM_LATENCIES, arm),
        f"{arm.bulk_tokens_per_s:.0f}" if "bulk" in arm.arm.roles else ABSENT,
        percent(arm.engine.busy_share),
    )


def versus_table(result: Result) -> Table:
    """Return a table of ratios: each mixed arm ÷ the same system under one kind of traffic alone."""
    header = ("arm", "", "TTFT p50", "TTFT p99", "ITL p99", "E2E p50", "E2E p99", "bulk kept", "harvest")
    rows = []
    for name, c in compare_all(result.arms).items():
        arm = result.arms[name]
        r = c.latency
        ratios = (r.ttft_p50, r.ttft_p99, r.itl_p99, r.e2e_p50, r.e2e_p99)
        cells = (name, arm.arm.title, *(interval(e) for e in ratios), number(c.bulk_kept), number(c.bulk_harvest))
        rows.append(Row(cells, _mark(arm)))
    return Table(header, tuple(rows))


def classes_table(result: Result) -> Table:
    """Return a table with a row for each traffic class in each arm."""
    header = ("arm", "class", "answered as", "SLO", "offered", "in time", "errors", "TTFT p50", "p99", "tok/s")
    rows = []
    for name, arm in result.arms.items():
        for class_name, s in arm.classes.items():
            met = arm.attainment.get(class_name)
            slo = result.slos.get(class_name)
            shown_slo = f"{slo.ttft_ms:g} / {slo.itl_ms or 0:g} ms" if slo and slo.ttft_ms else ABSENT
            cells = (
                name,
                class_name,
                ", ".join(s.answered_as) or ABSENT,
                shown_slo,
                str(s.offered),
                percent(met.share if met else None),
                str(s.errors),
                *cells_of((TTFT_P50, TTFT_P99), s),
                f"{s.tokens_per_s:.0f}",
            )
            rows.append(Row(cells, _mark(arm)))
    return Table(header, tuple(rows))


def jobs_table(result: Result) -> Table:
    """Return a table of the jobs (bulk requests with deadlines) of each arm: offered, refused, and done in time."""
    rows = []
    for name, arm in result.arms.items():
        offered = sum(s.offered for n, s in arm.classes.items() if has_deadline(result.scenario.classes[n]))
        refused = offered - arm.jobs.offered
        cells = (name, arm.arm.title, str(offered), str(refused), str(arm.jobs.met), percent(arm.jobs.share))
        rows.append(Row(cells, _mark(arm)))
    return Table(("arm", "", "offered", "refused", "in time", "of those admitted"), tuple(rows))


def engine_table(arms: Mapping[str, ArmSummary]) -> Table:
    """Return a table of the server's own metrics, with a row for each of our own arms. Step times are in ms.

    The reaction is the time from a request's arrival to its first step ÷ the duration of the step that ran at the
    arrival.
    """
    header = (
        "arm", "", "paused", "swapped", "recomputed", "suspended", "time wasted", "reaction p50", "p99",
        "step p50", "p99",
        "step-time error", "knob moves",
    )  # fmt: skip
    rows = []
    for arm in arms.values():
        if arm.arm.is_peer:
            continue
        e = arm.engine
        cells = (
            arm.arm.name,
            arm.arm.title,
            *(f"{count:.0f}" for count in e.preemptions.values()),
            number(e.suspensions, 0),
            percent(e.wasted_share),
            *(number(steps) for steps in (e.reaction_p50, e.reaction_p99)),
            *(milliseconds(s) for s in (e.step_p50_s, e.step_p99_s)),
            percent(e.step_time_error),
            number(e.moves, 0),
        )
        rows.append(Row(cells, _mark(arm)))
    return Table(header, tuple(rows))


def goals_table(goals: list[Goal]) -> Table:
    header = ("what", "target", "goal", "measured", "verdict", "")
    rows = tuple(Row((g.name, _bound(g, g.target), _bound(g, g.goal), _measured(g), g.verdict, g.note)) for g in goals)
    return Table(header, rows, note_columns=(5,), verdict_column=4)


def controls_table(controls: list[Control]) -> Table:
    words = {True: "fails, as it must", False: "DID NOT FAIL", None: "not run"}
    rows = tuple(Row((c.name, words[c.failed], c.detail)) for c in controls)
    return Table(("negative control", "outcome", ""), rows)


def _mark(arm: ArmSummary) -> str:
    return "ours" if arm.arm.name == OURS else ""


def _bound(goal: Goal, bound: float) -> str:
    shown = f"{100 * bound:g} %" if goal.is_share else f"{bound:g}"
    return f"{DIRECTION[goal.higher_is_better]} {shown}"


def _measured(goal: Goal) -> str:
    if isinstance(goal.measured, Estimate):
        return interval(goal.measured)
    if goal.value is None:
        return ABSENT
    return percent(goal.value) if goal.is_share else f"{goal.value:.2f}"

