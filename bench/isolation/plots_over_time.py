"""Plots of one part over time: TTFT, bulk throughput, preemptions and the controller's knobs.

Knows parts; the style is in `loadtest.reporting.svg`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.isolation.attainment import has_met
from bench.isolation.rounds import Part
from loadtest.client.server_metrics import Series
from loadtest.reporting.svg import CYCLE, GREEN, MUTED, VIOLET, WARM, draw_svg, log_ms
from loadtest.traffic.scenario import Scenario, Targets

MAX_VECTOR_POINTS = 1500  # if there are more points, they are drawn as an image inside the SVG
BIN_S = 1.0  # seconds; width of the bins in which bulk tokens are counted


def arm_over_time(
    part: Part, scenario: Scenario, slos: Mapping[str, Targets], span_ms: tuple[float, float], top_rate: float
) -> str:
    """Draw one part: the TTFT of every interactive request with its SLO, bulk tokens per second, and preemptions.

    `span_ms` are the limits of the TTFT axis, and `top_rate` is the upper limit of the bulk axis. They should be the
    same for all arms, so that the drawings can be compared.
    """

    def draw(figure: Figure) -> None:
        top, middle, low = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.3, 1.3))
        _first_tokens(top, part, scenario, slos)
        top.set_ylim(*span_ms)
        starts, rates = bulk_rate(part, scenario)
        seconds, rates = np.append(starts, part.run.duration_s), np.append(rates, rates[-1])
        middle.fill_between(seconds, rates, step="post", color=GREEN, alpha=0.35, linewidth=0)
        middle.step(seconds, rates, where="post", color=GREEN, linewidth=1.2)
        middle.set_ylabel("bulk tok/s")
        middle.set_ylim(0, top_rate)
        _interference(low, part)
        low.set_xlabel("seconds since the part began")
        low.set_xlim(0, part.run.duration_s)

    return draw_svg(f"time-{part.arm.name}", 5.2, draw)


def _first_tokens(axes: Axes, part: Part, scenario: Scenario, slos: Mapping[str, Targets]) -> None:
    for colour, traffic in zip(CYCLE, scenario.with_role("interactive"), strict=False):
        outcomes = [o for o in part.run.outcomes.get(traffic.name, []) if o.ttft_s is not None]
        met = [has_met(o, slos[traffic.name]) for o in outcomes]
        for is_met, marker in ((True, "o"), (False, "x")):
            chosen = [o for o, m in zip(outcomes, met, strict=True) if m == is_met]
            if not chosen:
                continue
            axes.scatter(
                [o.due_s - part.run.start_s for o in chosen],
                [1e3 * (o.ttft_s or 0.0) for o in chosen],
                s=16,
                marker=marker,
                color=colour if is_met else WARM,
                alpha=0.8,
                linewidths=1.2 if not is_met else 0,
                label=f"{traffic.name}, {'in time' if is_met else 'slo missed'} ({len(chosen)})",
                rasterized=len(chosen) > MAX_VECTOR_POINTS,
            )
        target_ms = slos[traffic.name].ttft_ms
        if target_ms is not None:
            axes.axhline(target_ms, color=WARM, linewidth=1.1, linestyle="--")
    log_ms(axes.yaxis, axes.set_yscale)
    axes.set_ylabel("first token, ms")
    if axes.get_legend_handles_labels()[0]:
        _legend_above(axes)


def _interference(axes: Axes, part: Part) -> None:
    """Draw preemptions, evictions and paused sequences, if the server exports these metrics."""
    lines = {
        "preemptions/s": part.timeline.rate("tidegate_num_preemptions_total"),
        "steps evicted/s": part.timeline.rate("tidegate_steps_shed_total"),
    }
    drawn_any = False
    for (label, series), colour in zip(lines.items(), (VIOLET, WARM), strict=True):
        if series:
            times, values = _from(series, part.run.start_s)
            axes.plot(times, values, color=colour, linewidth=1.2, label=label)
            drawn_any = True
    paused = part.timeline.gauge("tidegate_num_requests_paused")
    if paused:
        times, values = _from(paused, part.run.start_s)
        axes.plot(times, values, color=MUTED, linewidth=1.2, label="sequences paused")
        drawn_any = True
    axes.set_ylabel("preempted")
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    if drawn_any:
        _legend_above(axes)


def knobs_over_time(part: Part, tiers: Sequence[str]) -> str | None:
    """Draw the batch size and max-wait of each tier; return None if the server does not export them."""
    sizes = {tier: part.timeline.gauge("tidegate_controller_batch_size", tier=tier) for tier in tiers}
    waits = {tier: part.timeline.gauge("tidegate_controller_max_wait_seconds", tier=tier) for tier in tiers}
    if not any(sizes.values()):
        return None

    def draw(figure: Figure) -> None:
        top, low = figure.subplots(2, 1, sharex=True)
        for axes, knobs, factor, label in ((top, sizes, 1.0, "batch size"), (low, waits, 1e3, "max-wait, ms")):
            for colour, (tier, series) in zip(CYCLE, knobs.items(), strict=False):
                times, values = _from(series, part.run.start_s)
                axes.step(times, factor * values, where="post", color=colour, linewidth=1.4, label=tier)
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
        _legend_above(top)
        low.set_xlabel("seconds since the part began")
        low.set_xlim(0, part.run.duration_s)

    return draw_svg(f"knobs-{part.arm.name}", 3.4, draw)


def bulk_rate(part: Part, scenario: Scenario) -> tuple[np.ndarray, np.ndarray]:
    """Return (start of each bin in seconds, bulk tokens per second in the bin), for all bulk classes together.

    A token is counted in the bin in which the client received it.
    """
    bins = max(1, int(np.ceil(part.run.duration_s / BIN_S)))
    tokens = np.zeros(bins)
    for traffic in scenario.with_role("bulk"):
        for outcome in part.run.outcomes.get(traffic.name, []):
            had = 0
            for at_s, has in outcome.progress:
                index = int((at_s - part.run.start_s) // BIN_S)
                if 0 <= index < bins:
                    tokens[index] += has - had
                had = has
    return BIN_S * np.arange(bins), tokens / BIN_S


def first_token_span_ms(parts: Sequence[Part], slos: Mapping[str, Targets]) -> tuple[float, float]:
    """Return limits of a TTFT axis in ms, such that every TTFT of the parts and every TTFT SLO is shown."""
    waited = [o.ttft_s for part in parts for name in slos for o in part.run.outcomes.get(name, [])]
    shown = [1e3 * s for s in waited if s] + [t.ttft_ms for t in slos.values() if t.ttft_ms]
    return (0.8 * min(shown), 1.25 * max(shown)) if shown else (1.0, 1000.0)


def _legend_above(axes: Axes) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=8, borderaxespad=0.1)


def _from(series: Series, start_s: float) -> tuple[np.ndarray, np.ndarray]:
    times, values = zip(*series, strict=True) if series else ((), ())
    return np.array(times) - start_s, np.array(values)
