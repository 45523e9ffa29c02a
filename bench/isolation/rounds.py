"""The interleaved run: every arm runs once in every round, on one machine, with the same requests.

With three or more arms, their order changes from round to round, so that no arm always follows the same one. The
requests of each arm and round have a separate `cache_salt`, so that no prompt is found in the prefix cache because
another arm sent it. Knows the order of the runs; computes no statistics.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from bench.isolation.admin import Systems, put_tiers, wait_until_quiet
from bench.isolation.arms import Arm
from loadtest.client.http import Target
from loadtest.client.runner import ArmRun, Timing, run_arm
from loadtest.client.server_metrics import STEP_SECONDS, Timeline, watch
from loadtest.progress import progress as shown
from loadtest.traffic.scenario import Scenario, TrafficClass

Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(slots=True)
class Part:
    """The measurement of one arm in one round. `timeline` holds the server's metrics in the measured window."""

    arm: Arm
    round_: int
    run: ArmRun
    timeline: Timeline
    was_quiet: bool = True  # the metrics showed no more work of the previous arm when the part began


@dataclass(slots=True)
class Rounds:
    """The measurements of all rounds, by arm. The arms are in the order of the report."""

    parts: dict[str, list[Part]] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        self.parts.setdefault(part.arm.name, []).append(part)


async def run_rounds(
    systems: Systems, arms: Sequence[Arm], scenario: Scenario, timing: Timing, seed: int, progress: Progress
) -> Rounds:
    """Measure all arms in all rounds. Raises `TargetError` if a server does not accept an arm's tiers."""
    rounds = Rounds({arm.name: [] for arm in arms})
    with shown("parts", timing.rounds * len(arms)) as show:
        for round_ in range(timing.rounds):
            for number, arm in enumerate(order_of_round(arms, round_)):
                progress(f"round {round_ + 1} of {timing.rounds}: {arm.name}, {arm.title} ({timing.part_s:g} s)")
                rounds.add(await run_part(systems, arm, scenario, timing, seed, round_))
                show(round_ * len(arms) + number + 1)
    return rounds


async def run_part(
    systems: Systems,
    arm: Arm,
    scenario: Scenario,
    timing: Timing,
    seed: int,
    round_: int,
    salt: str = "",
    should_stop: Callable[[ArmRun], bool] | None = None,
) -> Part:
    """Run one arm once and return its measurement.

    `salt` becomes a part of the requests' `cache_salt`, and distinguishes runs of the same arm and round. The run ends
    early when `should_stop` returns True.
    """
    target = systems.of(arm.is_peer)
    was_quiet = all([await wait_until_quiet(each, 0.0) for each in systems.all])  # the systems share one machine
    if arm.tiers is not None:
        await put_tiers(target, arm.tiers)
    await asyncio.sleep(timing.settle_s)
    mine = [c for c in scenario.classes.values() if c.role in arm.roles]
    classes = [_with_salt(c, f"{salt}{arm.name}-{round_}-{seed}", arm.omitted) for c in mine]
    timeline = Timeline()
    async with _metrics_recorded(target, timeline):
        run = await run_arm(target, classes, timing.window, seed, round_, should_stop=should_stop)
    cut = timeline.within(run.start_s, run.end_s)
    busy_s = cut.delta(STEP_SECONDS)
    # The readings span a little more time than the window, so the engine's time is scaled to the window.
    run.busy_s = None if busy_s is None or not cut.span_s else busy_s * run.duration_s / cut.span_s
    return Part(arm, round_, run, cut, was_quiet)


@asynccontextmanager
async def _metrics_recorded(target: Target, timeline: Timeline) -> AsyncIterator[None]:
    watching = asyncio.create_task(watch(target, timeline))
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def _with_salt(traffic: TrafficClass, salt: str, omitted: Sequence[str]) -> TrafficClass:
    fields = {name: value for name, value in traffic.extra_body.items() if name not in omitted}
    return traffic.model_copy(update={"extra_body": {**fields, "cache_salt": salt}})


def order_of_round(arms: Sequence[T], round_: int) -> list[T]:
    """Return the arms in the order of a round.

    Every second round reverses the order of the one before, which balances drift within a round. The first arm changes
    with each pair of rounds.
    """
    first = (round_ // 2) % len(arms)
    turned = [*arms[first:], *arms[:first]]
    return turned if round_ % 2 == 0 else turned[::-1]
