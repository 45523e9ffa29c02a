"""The goals of the product, and whether an experiment reached them. Pure.

Each goal has two bounds: `target` must be reached, and `goal` is the stricter bound that is aimed at. Every experiment
lists all goals, including those that it does not measure. A goal does not count if its negative control did not fail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bench.isolation.arms import BULK_ALONE, BULK_SHIPPED, OURS, OURS_ALONE, STRICT
from bench.isolation.controls import TTFT_P50_TARGET, TTFT_P99_TARGET, Control, Evidence, controls_of
from bench.isolation.experiments import ExperimentName
from bench.isolation.summary import ArmSummary, compare_all
from loadtest.estimates import Estimate, harvest_limit

Verdict = Literal["goal", "target", "missed", "not measured", "does not count"]
SAMPLES_FOR_P99 = 3000  # TTFT samples that a claim about a p99 needs: 30 of them are above the p99
HARVEST_SLOWDOWNS = (1.05, 1.25, 1.5, 2.0)  # of whole interactive answers, at which bulk's harvest is judged
ISOLATION_LOAD = 0.5  # load for which the isolation goals are stated, as a share of the solo goodput


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal, with its two bounds and its measured value.

    `measured` is None if this run does not measure the goal. `counts` is False if the goal's negative control did not
    fail.
    """

    name: str
    target: float
    goal: float
    measured: Estimate | float | None = None
    higher_is_better: bool = False
    is_share: bool = False
    note: str = ""
    counts: bool = True

    @property
    def value(self) -> float | None:
        return self.measured.value if isinstance(self.measured, Estimate) else self.measured

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return "not measured"
        if not self._reaches(self.target):
            return "missed"
        if not self.counts:
            return "does not count"
        return "goal" if self._reaches(self.goal) else "target"

    def _reaches(self, bound: float) -> bool:
        value = self.value
        assert value is not None, "asked for what was measured"
        return value >= bound if self.higher_is_better else value <= bound


def judge(seen: Evidence) -> tuple[list[Goal], list[Control]]:
    """Return all goals with their measured values, and the negative controls of this experiment."""
    controls = controls_of(seen)
    did_not_fail = any(control.failed is False for control in controls)
    goals = [
        *_isolation(seen, did_not_fail),
        *_throughput(seen),
        *_overload(seen),
        *_engine(seen),
        _jobs(seen, did_not_fail),
        *_frontier(seen),
        _simulator(),
    ]
    return goals, controls


def _isolation(seen: Evidence, control_did_not_fail: bool) -> list[Goal]:
    p50 = Goal("isolation: TTFT p50, mixed ÷ alone", TTFT_P50_TARGET, 1.15)
    p99 = Goal("isolation: TTFT p99, mixed ÷ alone", TTFT_P99_TARGET, 1.10)
    attained = Goal("interactive SLO attainment, mixed", 0.97, 0.99, higher_is_better=True, is_share=True)
    if seen.experiment != "isolation" or OURS not in seen.arms:
        return [_measured_elsewhere(goal, seen, "isolation") for goal in (p50, p99, attained)]
    ours, versus = seen.arms[OURS], compare_all(seen.arms).get(OURS)
    samples = len(ours.ttft.samples)
    few = "" if samples >= SAMPLES_FOR_P99 else f"of {samples} first tokens; {SAMPLES_FOR_P99:,} for a claim on a GPU"
    alone = "" if versus else "A0 was not run"
    found = [
        replace(p50, measured=versus.latency.ttft_p50 if versus else None, note=_notes(alone, _load_note(seen))),
        replace(p99, measured=versus.latency.ttft_p99 if versus else None, note=_notes(alone, few)),
    ]
    share = replace(attained, measured=ours.total.share, note=f"of {ours.total.offered} offered")
    return [*(_checked_by_control(goal, "A2", control_did_not_fail) for goal in found), share]


def _load_note(seen: Evidence) -> str:
    if seen.solo_load is None:
        return "the load's share of the solo goodput was not measured"
    if seen.solo_load != ISOLATION_LOAD:
        return f"at {seen.solo_load:g} of the solo goodput; the goal is for {ISOLATION_LOAD:g}"
    return ""


def _throughput(seen: Evidence) -> list[Goal]:
    harvest = Goal("bulk harvest, of what interactive leaves", 0.75, 0.88, higher_is_better=True)
    over_strict = Goal("goodput ÷ strict priority", 1.2, 1.5, higher_is_better=True)
    versus = compare_all(seen.arms).get(OURS) if seen.experiment == "isolation" else None
    if versus is None:
        harvest = _measured_elsewhere(harvest, seen, "isolation")
    elif versus.bulk_harvest is None:
        harvest = replace(harvest, note="A1 was not run, or the server does not say how busy it was")
    else:
        harvest = replace(harvest, measured=versus.bulk_harvest)
    return [harvest, _over_strict(over_strict, seen)]


def _over_strict(goal: Goal, seen: Evidence) -> Goal:
    """Return the goal with our goodput ÷ that of strict priority, both at the load of this run.

    No arm can serve more requests in time than are offered, which bounds the ratio.
    """
    if OURS not in seen.arms or STRICT not in seen.arms:
        return replace(goal, note=f"{STRICT} was not run")
    ours, theirs = seen.arms[OURS], seen.arms[STRICT]
    if not theirs.met_per_s:
        return replace(goal, note=f"{STRICT} served nothing in time, Tidegate {ours.met_per_s:.2f} requests/s")
    most = theirs.total.offered / theirs.total.met
    note = f"interactive requests in time, at this load, where no ratio can be above {most:.2f}"
    return replace(goal, measured=ours.met_per_s / theirs.met_per_s, note=note)


def _overload(seen: Evidence) -> list[Goal]:
    top = Goal("1.5× overload for 60 s: misses of the top tier", 0.02, 0.005, is_share=True)
    everyone = Goal("1.5× overload for 60 s: all misses", 0.20, 0.10, is_share=True)
    if seen.experiment != "overload" or OURS not in seen.arms:
        return [_measured_elsewhere(goal, seen, "overload") for goal in (top, everyone)]
    ours = seen.arms[OURS]
    of_top = ours.attainment.get(seen.top_class)
    load = "the solo goodput was not measured"
    if seen.solo_load is not None:
        load = f"at {seen.solo_load * seen.factor:g} × the solo goodput for {seen.higher_for_s:.0f} s"
    return [
        replace(top, measured=_misses(of_top.share if of_top else None), note=_notes(f"of {seen.top_class!r}", load)),
        replace(
            everyone, measured=_misses(ours.total.share), note=f"of {ours.total.offered} offered, with those refused"
        ),
    ]


def _engine(seen: Evidence) -> list[Goal]:
    """Return the goals about the engine's steps, which every experiment measures."""
    ours = seen.arms.get(OURS)
    engine = ours.engine if ours else None
    recomputed = (
        f"; {engine.recomputed_tokens:.0f} tokens computed again" if engine and engine.recomputed_tokens else ""
    )
    return [
        Goal(
            "reaction p99 ÷ running step",
            2.0,
            1.2,
            engine.reaction_p99 if engine else None,
            note="as fine as its histogram's buckets",
        ),
        Goal(
            "bulk work wasted by preemption",
            0.05,
            0.01 if seen.on_gpu else 0.03,
            engine.wasted_share if engine else None,
            is_share=True,
            note=f"of bulk's engine time, in dropped steps{recomputed}",
        ),
        Goal("step-time error (MAPE)", 0.10, 0.04, engine.step_time_error if engine else None, is_share=True),
    ]


def _jobs(seen: Evidence, control_did_not_fail: bool) -> Goal:
    goal = Goal("admitted jobs with deadlines on time", 0.95, 0.99, higher_is_better=True, is_share=True)
    if seen.experiment != "deadlines" or OURS not in seen.arms:
        return _measured_elsewhere(goal, seen, "deadlines")
    jobs = seen.arms[OURS].jobs
    measured = replace(goal, measured=jobs.share, note=f"of {jobs.offered} admitted")
    return _checked_by_control(measured, "best effort", control_did_not_fail)


def _frontier(seen: Evidence) -> list[Goal]:
    """Return the goals of bulk's harvest: its tokens/s ÷ its full rate with nobody else there, ÷ the limit of that."""
    goals = [
        Goal(f"bulk harvest at an E2E slowdown of {slowdown:g} ÷ its limit", 0.85, 0.92, higher_is_better=True)
        for slowdown in HARVEST_SLOWDOWNS
    ]
    idle = Goal("bulk with nobody else there ÷ unlimited", 0.95, 0.98, higher_is_better=True)
    points = [(x, y) for name, x, y in frontier_points(seen.arms) if not seen.arms[name].arm.is_peer]
    limits = harvest_limits(seen.arms, HARVEST_SLOWDOWNS)
    if seen.experiment != "frontier" or not points or not limits:
        return [_measured_elsewhere(goal, seen, "frontier") for goal in (*goals, idle)]
    found = [
        replace(goal, measured=harvest_at(slowdown, points) / limit)
        for goal, (slowdown, limit) in zip(goals, limits, strict=True)
    ]
    full = seen.arms[BULK_ALONE].bulk_tokens_per_s
    shipped = seen.arms.get(BULK_SHIPPED)
    return [*found, replace(idle, measured=shipped.bulk_tokens_per_s / full if shipped and full else None)]


def harvest_limits(arms: Mapping[str, ArmSummary], slowdowns: Sequence[float]) -> list[tuple[float, float]]:
    """Return (slowdown, the most that bulk's tokens/s ÷ bulk alone can be); empty if the engine's use is unknown.

    Bulk's share of a step is taken to cost what it costs alone, so a GPU's limit is higher.
    """
    alone = arms.get(OURS_ALONE)
    share = alone.engine.busy_share if alone is not None else None
    return [] if share is None or share >= 1 else [(s, harvest_limit(s, share)) for s in slowdowns]


def frontier_points(arms: Mapping[str, ArmSummary]) -> list[tuple[str, float, float]]:
    """Return (arm, E2E p50 ÷ alone, bulk's tokens/s ÷ bulk alone) of each mixed arm of which both are known."""
    return [
        (name, c.latency.e2e_p50.value, c.bulk_kept)
        for name, c in compare_all(arms).items()
        if c.latency.e2e_p50 is not None and c.bulk_kept is not None
    ]


def harvest_at(slowdown: float, points: Sequence[tuple[float, float]]) -> float:
    """Return the harvest at a slowdown, by straight lines between the (slowdown, harvest) of `points`.

    Without bulk, the slowdown is 1 and the harvest 0. A point that is slower than another and harvests less is left
    out.
    """
    at, best = [1.0], [0.0]
    for x, y in sorted(points):
        if y > best[-1]:
            at.append(max(x, 1.0))
            best.append(y)
    return float(np.interp(slowdown, at, best))


def _simulator() -> Goal:
    note = "`bench simulator-accuracy` compares the simulator with this run's JSON"
    return Goal("simulator against the engine: TTFT and ITL, p50 and p95", 0.20, 0.10, is_share=True, note=note)


def _measured_elsewhere(goal: Goal, seen: Evidence, experiment: ExperimentName) -> Goal:
    here = seen.experiment == experiment
    return replace(goal, note="an arm that it needs was not run" if here else f"--experiment {experiment} measures it")


def _checked_by_control(goal: Goal, control: str, did_not_fail: bool) -> Goal:
    if not did_not_fail:
        return goal
    return replace(goal, counts=False, note=_notes(f"{control}, its negative control, did not fail", goal.note))


def _notes(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _misses(attained: float | None) -> float | None:
    return None if attained is None else 1.0 - attained
