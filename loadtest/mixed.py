"""The experiment behind the product's promise: interactive alone, bulk alone, and both, in one run.

Rounds of all arms follow each other, so that a drifting machine touches every arm alike, and an arm's round
sends the same requests as that round of the other arms. Knows arms; the numbers are made in `estimates`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

from loadtest.estimates import ClassSummary, Estimate, harvest, pooled, ratio, summarize
from loadtest.http_client import Target, TargetError, get
from loadtest.runner import ArmRun, ArmWindow, run_arm
from loadtest.scenario import Scenario

INTERACTIVE, BULK, MIXED = "interactive alone", "bulk alone", "mixed"
STEP_SECONDS = "tidegate_step_seconds_sum"
MAX_LAG_S = 0.02  # beyond this the client, not the server, shapes the arrivals
MAX_CLIENT_CPU_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Timing:
    """Every arm is measured for `duration_s` in all, cut into `rounds` parts."""

    duration_s: float
    rounds: int = 2
    lead_s: float = 3.0  # a backlog's time to fill the server before a part is measured
    settle_s: float = 1.0  # before each part: what the last one cancelled leaves the server
    drain_s: float = 20.0  # after each part: open-loop requests may still finish

    @property
    def part_s(self) -> float:
        return self.duration_s / self.rounds


@dataclass(frozen=True, slots=True)
class Isolation:
    """An interactive class beside bulk ÷ alone."""

    ttft_p50: Estimate | None
    ttft_p99: Estimate | None
    itl_p99: Estimate | None
    e2e_p50: Estimate | None


@dataclass(slots=True)
class MixedResult:
    summaries: dict[str, dict[str, ClassSummary]]  # arm → class
    isolation: dict[str, Isolation]
    bulk_kept: float | None  # bulk tokens/s mixed ÷ alone
    bulk_harvest: float | None
    busy_share: dict[str, float | None]  # engine time ÷ wall time of an arm, where the server exports it
    lag_p99_s: float
    client_cpu_share: float
    warnings: list[str] = field(default_factory=list)

    @property
    def has_answers(self) -> bool:
        """Each class got tokens in each of its arms: otherwise there is nothing to compare."""
        return all(s.tokens_per_s > 0 for arm in self.summaries.values() for s in arm.values())


async def run_mixed(
    target: Target, scenario: Scenario, timing: Timing, seed: int, report_progress: Callable[[str], None]
) -> MixedResult:
    """Warm the server up, then measure all arms, round after round."""
    arms = {
        INTERACTIVE: scenario.with_role("interactive"),
        BULK: scenario.with_role("bulk"),
        MIXED: tuple(scenario.classes.values()),
    }
    window = ArmWindow(timing.part_s, timing.lead_s, timing.drain_s)
    warm_up = ArmWindow(timing.lead_s, timing.lead_s, timing.drain_s)
    probe = partial(engine_busy_s, target)
    runs: dict[str, list[ArmRun]] = {arm: [] for arm in arms}
    await run_arm(target, arms[MIXED], warm_up, seed, round_=timing.rounds)
    for round_ in range(timing.rounds):
        for arm, classes in arms.items():
            report_progress(f"round {round_ + 1} of {timing.rounds}: {arm} ({window.duration_s:g} s)")
            await asyncio.sleep(timing.settle_s)
            runs[arm].append(await run_arm(target, classes, window, seed, round_, probe))
    return _conclude(scenario, runs)


def _conclude(scenario: Scenario, runs: dict[str, list[ArmRun]]) -> MixedResult:
    summaries = {
        arm: {name: summarize(arm_runs, name) for name in arm_runs[0].outcomes} for arm, arm_runs in runs.items()
    }
    bulk = [c.name for c in scenario.with_role("bulk")]
    alone, beside = pooled(summaries[BULK], bulk), pooled(summaries[MIXED], bulk)
    busy_share = {arm: _busy_share(arm_runs) for arm, arm_runs in runs.items()}
    every_run = [run for arm_runs in runs.values() for run in arm_runs]
    lags = sorted(lag for run in every_run for lag in run.lag_s)
    result = MixedResult(
        summaries,
        {
            c.name: _isolation(summaries[MIXED][c.name], summaries[INTERACTIVE][c.name])
            for c in scenario.with_role("interactive")
        },
        bulk_kept=beside / alone if alone else None,
        bulk_harvest=harvest(beside, alone, busy_share[INTERACTIVE]),
        busy_share=busy_share,
        lag_p99_s=lags[int(0.99 * (len(lags) - 1))] if lags else 0.0,
        client_cpu_share=max(run.client_cpu_share for run in every_run),
    )
    result.warnings = _warnings(result)
    return result


def _isolation(mixed: ClassSummary, alone: ClassSummary) -> Isolation:
    return Isolation(
        ttft_p50=ratio(mixed.ttft, alone.ttft, 0.5),
        ttft_p99=ratio(mixed.ttft, alone.ttft, 0.99),
        itl_p99=ratio(mixed.itl, alone.itl, 0.99),
        e2e_p50=ratio(mixed.e2e, alone.e2e, 0.5),
    )


def _busy_share(runs: list[ArmRun]) -> float | None:
    busy = [run.busy_s for run in runs if run.busy_s is not None]
    return sum(busy) / sum(run.duration_s for run in runs) if len(busy) == len(runs) else None


def _warnings(result: MixedResult) -> list[str]:
    """Why the numbers should not be believed, if there is a reason."""
    found: list[str] = []
    if result.lag_p99_s > MAX_LAG_S:
        found.append(f"requests were sent up to {1e3 * result.lag_p99_s:.0f} ms late (p99): the client is slow")
    if result.client_cpu_share > MAX_CLIENT_CPU_SHARE:
        found.append(f"the client used {result.client_cpu_share:.0%} of a core: it may be the bottleneck")
    for arm, classes in result.summaries.items():
        for name, summary in classes.items():
            if summary.errors:
                examples = "; ".join(summary.error_examples)
                found.append(f"{arm}, {name}: {summary.errors} of {summary.offered} failed ({examples})")
            if summary.unfinished and name in result.isolation:
                unfinished = f"{summary.unfinished} of {summary.offered} had no end when the arm was over"
                found.append(f"{arm}, {name}: {unfinished}; their times count as what they had waited by then")
    return found


async def engine_busy_s(target: Target) -> float | None:
    """Engine seconds since the server's start, over all workers; None where it does not export them."""
    try:
        text = (await get(target, "/metrics")).decode(errors="replace")
        families = list(text_string_to_metric_families(text))
    except (TargetError, ValueError):
        return None
    steps = [s.value for f in families for s in f.samples if s.name == STEP_SECONDS]
    return sum(steps) if steps else None
