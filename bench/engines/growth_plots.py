"""Plots of a growth run as PNG files. Knows matplotlib; computes medians only."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.engines.growth import Growth, GrowthPoint
from bench.engines.idle_cost import IdleCost

AXES = {"streams": "streams", "context": "tokens of context", "model": "model"}


def plot_growth(growth: Growth, directory: Path) -> list[Path]:
    """Write one PNG for each of streams, context and model, and one for the idle requests. Return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for axis, label in AXES.items():
        points = [point for point in growth.points if point.axis == axis]
        figure = Figure(figsize=(9, 4), layout="constrained")
        rates, steps = figure.subplots(1, 2)
        _plot_points(rates, axis, label, points, [p.tokens_per_s for p in points], "tokens/s")
        _plot_points(steps, axis, label, points, [1e3 * p.step_s for p in points], "ms a decode step")
        least_ms = [1e3 * p.roofline_s for p in points if p.roofline_s is not None]
        if len(least_ms) == len(points):
            steps.plot(_positions(axis, points), least_ms, linestyle="--", label="roofline")
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


def _plot_idle(costs: Sequence[IdleCost]) -> Figure:
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
