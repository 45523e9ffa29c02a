"""The plot of both Locust runs side by side: answers per second, and TTFT. Knows matplotlib."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from bench.locust.runs import LocustRun, answered_per_s
from loadtest.reporting.svg import ACCENT, MUTED, draw_svg

QUANTILES = ("p50", "p95", "p99")


def draw_runs(runs: Sequence[LocustRun]) -> str:
    """Return an `<svg>` element that compares both runs."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
        names, colours = [run.name for run in runs], (ACCENT, MUTED)
        bars = left.bar(names, [answered_per_s(run) for run in runs], color=colours, width=0.6)
        left.bar_label(bars, fmt="%.1f", padding=2)
        left.set_title("answers per second")
        for i, (run, colour) in enumerate(zip(runs, colours, strict=False)):
            entry = run.entries.get("realtime first token")
            times = (entry.p50_ms, entry.p95_ms, entry.p99_ms) if entry else (None, None, None)
            places = [q + 0.36 * (i - 0.5) for q in range(len(QUANTILES))]
            drawn_bars = right.bar(places, [ms or 0.0 for ms in times], width=0.34, color=colour, label=run.name)
            right.bar_label(drawn_bars, fmt="%.0f", padding=2, fontsize=9)
        right.set_xticks(range(len(QUANTILES)), QUANTILES)
        right.set_title("time to first token, ms")
        right.legend(loc="upper left")
        for axes in (left, right):
            axes.grid(False, axis="x")
            axes.margins(y=0.15)

    return draw_svg("locust", 3.2, draw)
