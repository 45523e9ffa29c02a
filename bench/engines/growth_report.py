"""A growth run as tables, plain data and plots. Computes ratios and medians; runs nothing."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.engines.growth import Growth, GrowthPoint
from bench.engines.resident import ResidentCost
from loadtest.report import table
from loadtest.reporting.formats import ABSENT

AXES = {"streams": "streams", "context": "tokens of context", "model": "model"}


def render_growth(growth: Growth) -> str:
    header = ("axis", "model", "streams", "context", "ms a step", "floor ms", "of the floor", "tok/s", "prefill tok/s")
    rows = [
        (
            point.axis,
            point.shape,
            str(point.streams),
            str(point.context),
            f"{1e3 * point.step_s:.2f}",
            ABSENT if point.floor_s is None else f"{1e3 * point.floor_s:.2f}",
            ABSENT if point.floor_s is None else f"{point.floor_s / point.step_s:.0%}",
            f"{point.tokens_per_s:.1f}",
            f"{point.prefill_tokens_per_s:.0f}",
        )
        for point in growth.points
    ]
    return "\n".join([table(header, rows), "", _render_idle(growth.idle)])


def _render_idle(costs: Sequence[ResidentCost]) -> str:
    header = ("bulk", "held", "resident", "claim ms", "plan ms", "engine ms", "apply ms", "sum ÷ none")
    rows = []
    for cost in costs:
        times = cost.times
        medians = [f"{1e3 * median(part):.3f}" for part in (times.claim, times.plan, times.engine, times.apply)]
        over = _over_none(cost, costs)
        rows.append((cost.kind, str(cost.idle), str(cost.resident), *medians, f"{over:.2f}"))
    dearest = [cost for cost in costs if cost.wanted == max(c.wanted for c in costs)]
    profiles = [f"\nplanning beside {cost.idle} {cost.kind} bulk requests:\n{cost.profile}" for cost in dearest]
    return "\n".join(["an interactive step beside bulk that does nothing (medians)", table(header, rows), *profiles])


def _over_none(cost: ResidentCost, costs: Sequence[ResidentCost]) -> float:
    """Median time of the whole step ÷ that with the fewest idle requests (none)."""
    least = min((c for c in costs if c.kind == cost.kind), key=lambda c: c.wanted)
    return median(cost.times.steps) / median(least.times.steps)


def growth_as_dict(growth: Growth) -> dict[str, Any]:
    return {
        "points": [asdict(point) | {"tokens_per_s": point.tokens_per_s} for point in growth.points],
        "idle": [asdict(cost) | {"over_none": _over_none(cost, growth.idle)} for cost in growth.idle],
    }


def plot_growth(growth: Growth, directory: Path) -> list[Path]:
    """One PNG an axis, and one of the idle requests; their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for axis, label in AXES.items():
        points = [point for point in growth.points if point.axis == axis]
        figure = Figure(figsize=(9, 4), layout="constrained")
        rates, steps = figure.subplots(1, 2)
        _plot_points(rates, axis, label, points, [p.tokens_per_s for p in points], "tokens/s")
        _plot_points(steps, axis, label, points, [1e3 * p.step_s for p in points], "ms a decode step")
        floors = [1e3 * p.floor_s for p in points if p.floor_s is not None]
        if len(floors) == len(points):
            steps.plot(_positions(axis, points), floors, linestyle="--", label="floor")
            steps.legend()
        written.append(directory / f"growth-{axis}.png")
        figure.savefig(written[-1], dpi=120)
    written.append(directory / "growth-idle.png")
    _plot_idle(growth.idle).savefig(written[-1], dpi=120)
    return written


def _plot_points(
    axes: Axes, axis: str, label: str, points: Sequence[GrowthPoint], values: Sequence[float], unit: str
) -> None:
    axes.plot(_positions(axis, points), list(values), marker="o", label="measured")
    if axis == "model":
        axes.set_xticks(range(len(points)), [point.shape for point in points])
    else:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _positions(axis: str, points: Sequence[GrowthPoint]) -> list[int]:
    if axis == "model":
        return list(range(len(points)))
    return [point.streams if axis == "streams" else point.context for point in points]


def _plot_idle(costs: Sequence[ResidentCost]) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("paused", "waiting"), strict=True):
        of_kind = [cost for cost in costs if cost.kind == kind]
        for part in ("claim", "plan", "engine", "apply"):
            values = [1e3 * median(getattr(cost.times, part)) for cost in of_kind]
            axes.plot([cost.idle for cost in of_kind], values, marker="o", label=part)
        axes.set_xscale("symlog")
        axes.set_xlabel(f"{kind} bulk requests")
        axes.set_ylabel("ms of an interactive step")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
