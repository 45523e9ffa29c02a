"""Plots that compare all arms: TTFT, bulk throughput against interactive attainment, and attainment over time.

Knows results; the style is in `loadtest.reporting.svg`.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from bench.isolation.arms import OURS, OURS_ALONE, PEER, PEER_ALONE
from bench.isolation.attainment import has_met
from bench.isolation.result import Result
from bench.isolation.summary import ArmSummary
from loadtest.reporting.svg import ACCENT, GREEN, MUTED, VIOLET, WARM, draw_svg, log_ms


def latency_by_arm(arms: Mapping[str, ArmSummary], target_ms: float | None) -> str:
    """Draw the TTFT of every arm with interactive traffic: median and p99 with their intervals."""
    shown = [arm for arm in arms.values() if len(arm.ttft.samples)]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, arm in enumerate(reversed(shown)):
            colour = _arm_colour(arm.arm.name)
            for q, marker in ((0.5, "o"), (0.99, "D")):
                e = arm.ttft.quantile(q)
                assert e is not None, "arms without samples are not shown"
                spread = [[1e3 * max(0.0, e.value - e.low)], [1e3 * max(0.0, e.high - e.value)]]
                axes.errorbar(
                    1e3 * e.value, row, xerr=spread, fmt=marker, color=colour, markersize=7, elinewidth=1.4, capsize=3
                )
        axes.set_yticks(range(len(shown)), [f"{a.arm.name}  {a.arm.title}" for a in reversed(shown)])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        log_ms(axes.xaxis, axes.set_xscale)
        axes.set_xlabel("time to first token, ms   (● median   ◆ p99, with 95 % intervals)")
        if target_ms is not None:
            axes.axvline(target_ms, color=WARM, linewidth=1.2, linestyle="--")
            axes.annotate(
                f"SLO {target_ms:g} ms", (target_ms, 1.0), (4, -2), ("data", "axes fraction"),
                textcoords="offset points", color=WARM, va="top", fontsize=9,
            )  # fmt: skip

    return draw_svg("latency", 0.9 + 0.42 * len(shown), draw)


def harvest_by_arm(arms: Mapping[str, ArmSummary]) -> str:
    """Draw each mixed arm as a point: interactive attainment against bulk throughput.

    Points further up and to the right are better.
    """
    mixed = [arm for arm in arms.values() if arm.arm.is_mixed]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for arm in mixed:
            share = 100 * (arm.total.share or 0.0)
            axes.scatter(arm.bulk_tokens_per_s, share, s=70, color=_arm_colour(arm.arm.name), zorder=3)
            axes.annotate(arm.arm.name, (arm.bulk_tokens_per_s, share), (7, 5), textcoords="offset points", fontsize=10)
        axes.axhline(99, color=WARM, linewidth=1.1, linestyle="--")
        axes.set_xlim(left=0, right=1.15 * max((arm.bulk_tokens_per_s for arm in mixed), default=1.0) or 1.0)
        axes.set_ylim(-4, 106)
        axes.set_xlabel("bulk tokens/s")
        axes.set_ylabel("interactive within the SLO, %")

    return draw_svg("harvest", 3.4, draw)


def attainment_over_time(result: Result, bin_s: float = 5.0) -> str:
    """Draw the share of requests within the SLO over their arrival time, one line for each arm.

    Each line covers all rounds of the arm. It shows how the arm reacts to a change of load.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name, parts in result.rounds.parts.items():
            bins = int(np.ceil(result.timing.part_s / bin_s))
            offered, met = np.zeros(bins), np.zeros(bins)
            for part in parts:
                for traffic in result.scenario.with_role("interactive"):
                    for o in part.run.outcomes.get(traffic.name, []):
                        index = min(bins - 1, int((o.due_s - part.run.start_s) / bin_s))
                        offered[index] += 1
                        met[index] += has_met(o, result.slos[traffic.name])
            shares = np.where(offered > 0, 100 * met / np.maximum(offered, 1), np.nan)
            edges, shares = bin_s * np.arange(bins + 1), np.append(shares, shares[-1])
            axes.step(edges, shares, where="post", color=_arm_colour(name), linewidth=1.8, label=name)
        spike = result.experiment.profile.spike(result.timing.part_s)
        if spike is not None:
            axes.axvspan(spike.at_s, spike.at_s + spike.for_s, color=MUTED, alpha=0.15, linewidth=0)
        axes.set_xlim(0, result.timing.part_s)
        axes.set_ylim(-4, 106)
        axes.set_ylabel("within the SLO, %")
        axes.set_xlabel("seconds since the part began; the higher load is shaded")
        axes.legend(loc="lower right", ncols=4)

    return draw_svg("attainment", 3.0, draw)


def _arm_colour(name: str) -> str:
    own = {OURS: ACCENT, OURS_ALONE: GREEN, PEER: VIOLET, PEER_ALONE: VIOLET}
    return own.get(name, MUTED)
