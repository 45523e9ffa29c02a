"""The drawings on the page of an experiment, grouped by section. Imports matplotlib.

Knows results; the plots that other reports have too are in `loadtest.measure.plots`.
"""

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure

from bench.isolation.arms import OURS, SLOWDOWN
from bench.isolation.goals import frontier_points, harvest_limits
from bench.isolation.results.record import ARMS, OVER_TIME, Drawings
from bench.isolation.results.result import Result
from bench.isolation.rounds import Part
from bench.isolation.slos import GOAL, has_met
from loadtest.client.runner import ArmRun
from loadtest.measure.figures import figures_of
from loadtest.measure.plots import TradeOff, distribution_drawings, time_drawings, trade_off_drawing
from loadtest.measure.rounds import Arm as Line
from loadtest.measure.rounds import Measurement
from loadtest.reporting.record import Drawing
from loadtest.reporting.svg import CYCLE, MUTED, draw_svg

BIN_S = 5.0  # seconds; width of the bins of arrivals whose attainment is drawn


def draw_experiment(result: Result) -> Drawings:
    trade_off = _frontier(result) if result.experiment.name == "frontier" else _harvest_by_arm(result)
    by_arm = (trade_off, *distribution_drawings(figures_of(_measurement(result, ("interactive",)))))
    over_time = time_drawings(_measurement(result, ("interactive", "bulk"), first_mixed_parts=True))
    if result.experiment.profile.factor != 1.0:
        over_time = (Drawing(_attainment_over_time(result), "Within the SLO, all rounds"), *over_time)
    return {ARMS: by_arm, OVER_TIME: over_time}


def _harvest_by_arm(result: Result) -> Drawing:
    """Draw each mixed arm as a point: interactive attainment against bulk throughput."""
    points = [
        TradeOff(name, arm.bulk_tokens_per_s, 100 * (arm.total.share or 0.0), is_ours=name == OURS)
        for name, arm in result.arms.items()
        if arm.arm.is_mixed
    ]
    axes = ("bulk tokens/s", "interactive within the SLO, %")
    return trade_off_drawing("What interactive gets, and what bulk gets", axes, points, goal=100 * GOAL)


def _frontier(result: Result) -> Drawing:
    """Draw each mixed arm as a point: bulk's harvest against the slowdown of whole answers, below its limit."""
    points = [
        TradeOff(arm.removeprefix(SLOWDOWN), x, y, is_ours=not result.arms[arm].arm.is_peer)
        for arm, x, y in frontier_points(result.arms)
    ]
    slowest = max((p.x for p in points), default=1.0)
    limit = harvest_limits(result.arms, [float(x) for x in np.geomspace(1.0, max(slowest, 1.25), 50)])
    axes = ("E2E p50 ÷ alone", "bulk tokens/s ÷ bulk alone")
    return trade_off_drawing("Harvest against slowdown, and its limit", axes, points, limit=limit, is_log=True)


def _measurement(result: Result, roles: Iterable[str], first_mixed_parts: bool = False) -> Measurement:
    """Return the parts as a measurement whose arms send the classes with these roles."""
    lines, runs = [], dict[str, list[ArmRun]]()
    for name, parts in result.rounds.parts.items():
        arm = parts[0].arm
        classes = [c for c in result.scenario.classes.values() if c.role in roles and c.role in arm.roles]
        if classes and (arm.is_mixed or not first_mixed_parts):
            lines.append(Line(name, tuple(classes)))
            runs[name] = [part.run for part in (parts[:1] if first_mixed_parts else parts)]
    return Measurement(tuple(lines), runs)


def _attainment_over_time(result: Result) -> str:
    """Draw the share of requests within the SLO over their arrival time, one line for each arm, over all rounds."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, (name, parts) in zip(CYCLE, result.rounds.parts.items(), strict=False):
            edges, shares = _attainment(result, parts)
            axes.stairs(shares, edges, color=colour, linewidth=1.8, label=name, baseline=None)
        spike = result.experiment.profile.spike(result.timing.part_s)
        if spike is not None:
            axes.axvspan(spike.at_s, spike.at_s + spike.for_s, color=MUTED, alpha=0.15, linewidth=0)
        axes.set_xlim(0, result.timing.part_s)
        axes.set_ylim(-4, 106)
        axes.set_ylabel("within the SLO, %")
        axes.set_xlabel("seconds since the part began; the higher load is shaded")
        axes.legend(loc="lower right", ncols=4)

    return draw_svg("attainment", 3.0, draw)


def _attainment(result: Result, parts: Iterable[Part]) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of bins of `BIN_S`, and the share of requests within the SLO in each, in percent."""
    edges = np.append(np.arange(0.0, result.timing.part_s, BIN_S), result.timing.part_s)
    arrived = [
        (o.due_s - part.run.start_s, has_met(o, result.slos[traffic.name]))
        for part in parts
        for traffic in result.scenario.with_role("interactive")
        for o in part.run.outcomes.get(traffic.name, [])
    ]
    offered, _ = np.histogram([at_s for at_s, _ in arrived], bins=edges)
    met, _ = np.histogram([at_s for at_s, is_met in arrived if is_met], bins=edges)
    return edges, np.where(offered > 0, 100 * met / np.maximum(offered, 1), np.nan)
