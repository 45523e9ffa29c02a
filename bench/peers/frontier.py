"""Harvest against slowdown: what bulk gets beside interactive traffic, and how much slower that traffic becomes.

One point for each value of `max_slowdown`, and one for vLLM's server with its priorities. Knows settings and the order
of the runs; does not know how results are shown.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np

from bench.isolation.admin import Systems, wait_until_quiet
from bench.isolation.arms import BOTH, BULK, INTERACTIVE, Arm, Document, has_slo
from bench.isolation.goals import Goal
from bench.isolation.rounds import Progress, Rounds, order_of_round, run_part
from bench.isolation.run import WARM_UP_ROUND, check_answers
from bench.isolation.summary import ArmSummary
from bench.peers.arms import DEFAULT, VLLM, Servers
from bench.peers.processes import CpuMeter
from loadtest.client.runner import Timing
from loadtest.estimates import LatencyRatios, latency_ratios
from loadtest.traffic.scenario import Scenario

ALONE, BULK_ALONE, BULK_UNLIMITED = "alone", "bulk alone", "bulk alone, unlimited"
SHIPPED, UNLIMITED = "as configured", "unlimited"
VLLM_ALONE, VLLM_BULK, VLLM_BOTH = "vLLM alone", "vLLM, bulk alone", "vLLM, its priorities"
WARM_UP_S = 6.0  # seconds
# Floor and goal of bulk's harvest, by the slowdown of whole interactive answers.
HARVEST_GOALS = {1.25: (0.42, 0.45), 1.5: (0.5, 0.55), 2.0: (0.6, 0.65), 4.0: (0.8, 0.85)}
IDLE_GOAL = (0.9, 0.97)  # floor and goal of bulk's rate with nobody else there ÷ its unlimited rate


@dataclass(frozen=True, slots=True)
class Point:
    """One mixed arm. Harvest is bulk's tokens per second ÷ its unlimited rate on the same system, without others."""

    name: str
    is_ours: bool
    latency: LatencyRatios  # ÷ the same system without bulk
    attainment: float | None
    bulk_tokens_per_s: float
    harvest: float | None

    @property
    def slowdown(self) -> float | None:
        """The median time of a whole answer ÷ the same without bulk."""
        return self.latency.e2e_p50.value if self.latency.e2e_p50 else None


def frontier_arms(document: Document, slowdowns: Sequence[float], has_vllm: bool) -> list[Arm]:
    """Return all arms in the order of the report. `document` holds the tiers of our arms."""
    unlimited = without_limit(document)
    arms = [
        Arm(ALONE, (INTERACTIVE,), document),
        Arm(BULK_ALONE, (BULK,), document),
        Arm(BULK_UNLIMITED, (BULK,), unlimited),
        Arm(SHIPPED, BOTH, document),
        *(Arm(slowdown_name(value), BOTH, with_max_slowdown(document, value)) for value in slowdowns),
        Arm(UNLIMITED, BOTH, unlimited),
    ]
    if has_vllm:
        arms += [Arm(VLLM_ALONE, (INTERACTIVE,), None), Arm(VLLM_BULK, (BULK,), None), Arm(VLLM_BOTH, BOTH, None)]
    return arms


def slowdown_name(value: float) -> str:
    return f"max_slowdown {value:g}"


def without_limit(document: Document) -> Document:
    """Return the document with steps that interactive deadlines do not limit, in which bulk has its full rate."""
    changed = deepcopy(document)
    changed["controller"] = {**(changed.get("controller") or {}), "feed_forward": False}
    return changed


def with_max_slowdown(document: Document, value: float) -> Document:
    """Return the document in which every tier with an SLO has this `max_slowdown`."""
    changed = deepcopy(document)
    for tier in changed["tiers"].values():
        if has_slo(tier):
            tier["max_slowdown"] = value
    return changed


@dataclass(slots=True)
class FrontierRun:
    rounds: Rounds
    other_cores: list[tuple[str, float | None]]  # (arm, cores that the servers of other arms used)


async def run_frontier(
    servers: Servers, arms: Sequence[Arm], scenario: Scenario, timing: Timing, seed: int, progress: Progress
) -> FrontierRun:
    """Measure all arms in all rounds.

    Raises `TargetError` if a server does not answer, refuses an arm's tiers, or serves nothing in the warm-up.
    """
    ours = servers.target(DEFAULT)
    systems = Systems(ours, servers.vllm.target if servers.vllm else None)
    progress("warm-up")
    short = replace(timing, duration_s=min(WARM_UP_S, timing.duration_s), rounds=1)
    for arm in arms:  # every setting once, so that a setting that the server refuses ends the run at its start
        if arm.is_mixed:
            check_answers(await run_part(systems, arm, scenario, short, seed, WARM_UP_ROUND, "warm-up-"))
    run = FrontierRun(Rounds({arm.name: [] for arm in arms}), [])
    for round_ in range(timing.rounds):
        for arm in order_of_round(arms, round_):
            progress(f"round {round_ + 1} of {timing.rounds}: {arm.name} ({timing.part_s:g} s)")
            for server in servers.all:  # what a server still does for its last arm is not its idle cost
                await wait_until_quiet(server.target, 0.0)
            others = CpuMeter(servers.others(VLLM if arm.is_peer else DEFAULT))
            run.rounds.add(await run_part(systems, arm, scenario, timing, seed, round_))
            run.other_cores.append((arm.name, others.cores()))
    return run


def points_of(arms: dict[str, ArmSummary]) -> list[Point]:
    """Return a point for each mixed arm."""
    found = []
    for name, summary in arms.items():
        if not summary.arm.is_mixed:
            continue
        is_peer = summary.arm.is_peer
        alone, bulk = arms[VLLM_ALONE if is_peer else ALONE], arms[VLLM_BULK if is_peer else BULK_UNLIMITED]
        rate = bulk.bulk_tokens_per_s
        found.append(
            Point(
                name,
                not is_peer,
                latency_ratios(summary, alone),
                summary.total.share,
                summary.bulk_tokens_per_s,
                summary.bulk_tokens_per_s / rate if rate else None,
            )
        )
    return found


def harvest_at(slowdown: float, points: Sequence[Point]) -> float:
    """Return the harvest of our frontier at a slowdown, between its points by straight lines.

    Without bulk, the slowdown is 1 and the harvest 0. A point that is slower than another and harvests less is left
    out.
    """
    measured = sorted((p.slowdown, p.harvest) for p in points if p.is_ours and p.slowdown and p.harvest is not None)
    at, best = [1.0], [0.0]
    for x, y in measured:
        if y > best[-1]:
            at.append(max(x, 1.0))
            best.append(y)
    return float(np.interp(slowdown, at, best))


def frontier_goals(arms: dict[str, ArmSummary], points: Sequence[Point]) -> list[Goal]:
    goals = [
        Goal(
            f"bulk harvest at an E2E slowdown of {slowdown:g}",
            floor,
            goal,
            harvest_at(slowdown, points),
            higher_is_better=True,
        )
        for slowdown, (floor, goal) in HARVEST_GOALS.items()
    ]
    unlimited, shipped = arms[BULK_UNLIMITED].bulk_tokens_per_s, arms[BULK_ALONE].bulk_tokens_per_s
    idle = shipped / unlimited if unlimited else None
    return [*goals, Goal("bulk with nobody else there ÷ unlimited", *IDLE_GOAL, idle, higher_is_better=True)]
