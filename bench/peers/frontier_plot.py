"""The plot of the frontier: harvest against the slowdown of whole answers and of first tokens. Imports matplotlib."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.peers.frontier import HARVEST_GOALS, Point
from loadtest.estimates import Estimate
from loadtest.reporting.svg import ACCENT, MUTED, VIOLET, WARM, draw_svg, log_ms


def draw_frontier(points: Sequence[Point]) -> str:
    """Return an `<svg>` element. Points further up and to the left are better; crosses are the goals.

    A point with a number only is the one with this `max_slowdown`.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_points(left, points, lambda p: p.latency.e2e_p50)
        left.plot(list(HARVEST_GOALS), [goal for _, goal in HARVEST_GOALS.values()], "x", color=WARM, label="goal")
        left.set_xlabel("E2E p50 ÷ alone")
        left.set_ylabel("bulk tokens/s ÷ unlimited")
        _draw_points(right, points, lambda p: p.latency.ttft_p99)
        right.set_xlabel("TTFT p99 ÷ alone")
        left.set_ylim(bottom=0)
        left.legend(loc="lower right")

    return draw_svg("frontier", 3.8, draw)


def _draw_points(axes: Axes, points: Sequence[Point], value: Callable[[Point], Estimate | None]) -> None:
    shown = [(e.value, p.harvest, p) for p in points if (e := value(p)) is not None and p.harvest is not None]
    line = sorted((x, y) for x, y, p in shown if p.is_ours)
    axes.plot([x for x, _ in line], [y for _, y in line], color=MUTED, linewidth=1)
    for is_ours, colour, label in ((True, ACCENT, "Tidegate"), (False, VIOLET, "vLLM")):
        mine = [(x, y) for x, y, p in shown if p.is_ours is is_ours]
        axes.scatter([x for x, _ in mine], [y for _, y in mine], color=colour, s=50, zorder=3, label=label)
    for x, y, point in shown:
        axes.annotate(point.name.removeprefix("max_slowdown "), (x, y), (6, -4), textcoords="offset points", fontsize=8)
    log_ms(axes.xaxis, axes.set_xscale)
    axes.set_xlim(0.95, 2 * max((x for x, _, _ in shown), default=4.0))  # with room for the names on the right
