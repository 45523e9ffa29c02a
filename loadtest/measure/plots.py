"""The plots of reports: distributions of latencies, what happened over time, and one figure against another.

Knows matplotlib. Each plot is small, so that it can be read on a phone; the page places them beside each other on a
wide screen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from loadtest.client.runner import ArmRun
from loadtest.estimates import Distribution
from loadtest.measure.figures import ClassFigures, Figures, token_rate
from loadtest.measure.rounds import Measurement
from loadtest.reporting.record import Drawing
from loadtest.reporting.svg import ACCENT, CYCLE, INK, MUTED, WARM, draw_svg, log_ms

WIDTH_IN, HEIGHT_IN = 4.0, 2.9
SHORTEST_MS = 0.1  # tokens that arrive together have gaps of 0, which a logarithmic axis cannot show
CURVE_POINTS = 200  # points of a distribution, whatever the number of samples
MAX_LABELLED_SPAN = 100  # on an axis with a larger ratio of its ends, only powers of ten are labelled
MAX_VECTOR_DOTS = 600  # if there are more dots, they are drawn as an image inside the SVG
LATENCIES: tuple[tuple[str, str, Callable[[ClassFigures], Distribution]], ...] = (
    ("TTFT", "Time to first token", lambda f: f.summary.ttft),
    ("ITL", "Gap between tokens", lambda f: f.summary.itl),
    ("E2E", "Time of a whole answer", lambda f: f.summary.e2e),
)


@dataclass(frozen=True, slots=True)
class TradeOff:
    """One arm as a point: what one side gets (`x`), and what the other side gets (`y`)."""

    name: str
    x: float
    y: float
    is_ours: bool


def trade_off_drawing(
    title: str,
    axes_labels: tuple[str, str],
    points: Sequence[TradeOff],
    *,
    goal: float | None = None,
    limit: Sequence[tuple[float, float]] = (),
    is_log: bool = False,
) -> Drawing:
    """Return a plot of the points with their names. A dashed line is a goal of `y`; the curve is its limit."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for p in points:
            axes.scatter(p.x, p.y, s=45, color=ACCENT if p.is_ours else MUTED, zorder=3)
            axes.annotate(p.name, (p.x, p.y), (6, -4), textcoords="offset points", fontsize=8)
        axes.plot([x for x, _ in limit], [y for _, y in limit], color=WARM, linewidth=1.1)
        if goal is not None:
            axes.axhline(goal, color=WARM, linewidth=1.1, linestyle="--")
        if is_log:
            log_ms(axes.xaxis, axes.set_xscale)
        else:
            axes.set_xlim(left=0)
        axes.set_xlim(right=1.4 * max((p.x for p in points), default=1.0) or 1.0)  # with room for the last name
        axes.set_ylim(bottom=0)
        axes.set_xlabel(axes_labels[0])
        axes.set_ylabel(axes_labels[1])

    return Drawing(draw_svg(f"trade-off-{axes_labels[0]}", HEIGHT_IN, draw, WIDTH_IN), title, is_small=True)


def distribution_drawings(figures: Figures) -> tuple[Drawing, ...]:
    """Return a plot of each latency that was measured, with a line for each class of each arm."""
    drawings = []
    for short, title, choose in LATENCIES:
        streamed_only = short != "E2E"
        lines = {
            label: choose(f).samples
            for label, f in _labelled(figures)
            if (f.is_streamed or not streamed_only) and len(choose(f).samples)
        }
        if lines:
            svg = draw_svg(f"distribution-{short}", HEIGHT_IN, partial(_curves, lines=lines), WIDTH_IN)
            drawings.append(Drawing(svg, title, "Share of requests or gaps below each time.", is_small=True))
    return tuple(drawings)


def _curves(figure: Figure, lines: Mapping[str, np.ndarray]) -> None:
    axes = figure.subplots()
    shares = np.linspace(0, 1, CURVE_POINTS + 1)
    for (label, samples), (colour, style) in zip(lines.items(), _styles(), strict=False):
        times = np.maximum(1e3 * np.quantile(samples, shares), SHORTEST_MS)
        axes.plot(times, 100 * shares, color=colour, linestyle=style, linewidth=1.6, label=label)
    log_ms(axes.xaxis, axes.set_xscale)
    low, high = axes.get_xlim()
    if high > MAX_LABELLED_SPAN * low:
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_xlabel("ms")
    axes.set_ylabel("%")
    _legend(axes)


def time_drawings(measurement: Measurement) -> tuple[Drawing, ...]:
    """Return plots over the whole measurement, with the arms marked: tokens a second, and each request's TTFT."""
    drawings = [
        Drawing(
            draw_svg("tokens-over-time", HEIGHT_IN, lambda figure: _tokens(figure, measurement), WIDTH_IN),
            "Output tokens a second",
            is_small=True,
        )
    ]
    if any(c.stream for arm in measurement.measured for c in arm.classes):
        svg = draw_svg("ttft-over-time", HEIGHT_IN, lambda figure: _first_tokens(figure, measurement), WIDTH_IN)
        drawings.append(Drawing(svg, "First token of each request", "At the time when it was due.", is_small=True))
    return tuple(drawings)


def _tokens(figure: Figure, measurement: Measurement) -> None:
    axes = figure.subplots()
    offsets = _offsets(measurement)
    for run, label, colour, style, name in _class_runs(measurement):
        edges, rates = token_rate(run, name)
        axes.stairs(rates, edges + offsets[run.start_s], color=colour, linestyle=style, linewidth=1.4, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s")
    _mark_arms(axes, measurement)


def _first_tokens(figure: Figure, measurement: Measurement) -> None:
    axes = figure.subplots()
    offsets = _offsets(measurement)
    for run, label, colour, _, name in _class_runs(measurement):
        begun = [o for o in run.outcomes[name] if o.ttft_s is not None and o.due_s >= run.start_s]
        axes.scatter(
            [o.due_s + offsets[run.start_s] for o in begun],
            [max(SHORTEST_MS, 1e3 * (o.ttft_s or 0.0)) for o in begun],
            s=7,
            color=colour,
            alpha=0.6,
            linewidths=0,
            label=label,
            rasterized=len(begun) > MAX_VECTOR_DOTS,
        )
    log_ms(axes.yaxis, axes.set_yscale)
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_ylabel("ms")
    _mark_arms(axes, measurement)


def _offsets(measurement: Measurement) -> dict[float, float]:
    """Return, by its start, what to add to a run's times so that the runs follow each other without pauses."""
    offsets, measured_s = {}, 0.0
    for run in sorted((run for runs in measurement.runs.values() for run in runs), key=lambda run: run.start_s):
        offsets[run.start_s] = measured_s - run.start_s
        measured_s += run.duration_s
    return offsets


def _mark_arms(axes: Axes, measurement: Measurement) -> None:
    """Shade the time of each run, and write the name of its arm above it, if there are several arms."""
    axes.set_xlabel("seconds measured")
    offsets = _offsets(measurement)
    if len(measurement.arms) > 1:
        for number, arm in enumerate(measurement.measured):
            for run in measurement.runs[arm.name]:
                start_s, end_s = run.start_s + offsets[run.start_s], run.end_s + offsets[run.start_s]
                axes.axvspan(start_s, end_s, color=INK, alpha=0.03 if number % 2 == 0 else 0.09, linewidth=0)
                place = (start_s + end_s) / 2
                axes.text(
                    place, 1.01, arm.name, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=7
                )
    _legend(axes)


def _class_runs(measurement: Measurement) -> Iterator[tuple[ArmRun, str, str, str, str]]:
    """Yield (run, label, colour, line style, class) of each class in each run; only the first run has a label."""
    styles = _styles()
    for arm in measurement.measured:
        for traffic in arm.classes:
            colour, style = next(styles)
            label = _label(arm.name, traffic.name, len(measurement.measured), len(arm.classes))
            for number, run in enumerate(measurement.runs[arm.name]):
                yield run, label if number == 0 else "", colour, style, traffic.name


def _labelled(figures: Figures) -> Iterator[tuple[str, ClassFigures]]:
    for arm, classes in figures.items():
        for name, of_class in classes.items():
            yield _label(arm, name, len(figures), len(classes)), of_class


def _label(arm: str, name: str, num_arms: int, num_classes: int) -> str:
    """Return the arm, the class, or both: what tells a line from the others of its plot."""
    if num_arms == 1:
        return name
    return arm if num_classes == 1 else f"{name}, {arm}"


def _styles() -> Iterator[tuple[str, str]]:
    """Yield colours and line styles, which differ for each line."""
    for style in ("-", "--", ":"):
        for colour in CYCLE:
            yield colour, style


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8, markerscale=2)
