"""Measure isolation on any server: interactive traffic alone, bulk traffic alone, and both together, in one run.

The rounds of the three arms alternate, so that a machine that slows down affects every arm alike. In the same round,
all arms send the same requests. Knows arms; `estimates` computes the numbers.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from loadtest.client.http import Target
from loadtest.client.runner import ArmRun, Timing, run_arm
from loadtest.client.server_metrics import engine_busy_s
from loadtest.estimates import (
    ClassSummary,
    LatencyRatios,
    busy_share,
    client_warnings,
    failure_warnings,
    harvest,
    lag_p99_s,
    latency_ratios,
    pooled,
    summarize,
)
from loadtest.traffic.scenario import Scenario

INTERACTIVE, BULK, MIXED = "interactive alone", "bulk alone", "mixed"


@dataclass(slots=True)
class MixedResult:
    summaries: dict[str, dict[str, ClassSummary]]  # arm → class → summary
    isolation: dict[str, LatencyRatios]  # by interactive class: latencies in the mixed arm ÷ alone
    bulk_kept: float | None  # bulk tokens/s in the mixed arm ÷ bulk tokens/s alone
    bulk_harvest: float | None  # as `estimates.harvest` defines it
    busy_share: dict[str, float | None]  # by arm: engine time ÷ wall time; None if the server does not export it
    lag_p99_s: float
    client_cpu_share: float
    warnings: list[str] = field(default_factory=list)

    @property
    def has_answers(self) -> bool:
        """True if each class received tokens in each of its arms. Without them there is nothing to compare."""
        return all(s.answered > 0 for arm in self.summaries.values() for s in arm.values())


async def run_mixed(
    target: Target, scenario: Scenario, timing: Timing, seed: int, report_progress: Callable[[str], None]
) -> MixedResult:
    """Warm the server up, then measure all arms, round after round."""
    arms = {
        INTERACTIVE: scenario.with_role("interactive"),
        BULK: scenario.with_role("bulk"),
        MIXED: tuple(scenario.classes.values()),
    }
    window, warm_up = timing.window, replace(timing.window, duration_s=timing.lead_s or 1.0)
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
    busy = {arm: busy_share(arm_runs) for arm, arm_runs in runs.items()}
    every_run = [run for arm_runs in runs.values() for run in arm_runs]
    result = MixedResult(
        summaries,
        {
            c.name: latency_ratios(summaries[MIXED][c.name], summaries[INTERACTIVE][c.name])
            for c in scenario.with_role("interactive")
        },
        bulk_kept=beside / alone if alone else None,
        bulk_harvest=harvest(beside, alone, busy[INTERACTIVE]),
        busy_share=busy,
        lag_p99_s=lag_p99_s(every_run),
        client_cpu_share=max(run.client_cpu_share for run in every_run),
    )
    result.warnings = _warnings(result)
    return result


def _warnings(result: MixedResult) -> list[str]:
    """Return the reasons not to trust the numbers of the result, as sentences."""
    found = client_warnings(result.lag_p99_s, result.client_cpu_share)
    for arm, classes in result.summaries.items():
        found += failure_warnings(arm, classes)
        for name, summary in classes.items():
            if summary.unfinished and name in result.isolation:
                unfinished = f"{summary.unfinished} of {summary.offered} had no end when the arm was over"
                found.append(f"{arm}, {name}: {unfinished}; their times count as what they had waited by then")
    return found
