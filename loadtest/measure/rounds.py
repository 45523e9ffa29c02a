"""The arms of a measurement, and their rounds: a server or machine that slows down affects every arm alike.

Knows the ways to compare, and how a measurement ends early; does not know servers or statistics.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from loadtest.client.http import Target
from loadtest.client.runner import ArmRun, Timing, run_arm
from loadtest.traffic.scenario import TrafficClass

WITH_TIERS, WITHOUT_TIERS = "with tiers", "without tiers"
BATCHED, ONE_AT_A_TIME = "batched", "one at a time"
Comparison = Literal["tiers", "batching"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to send the classes. `at_once` is the most requests that are sent at the same time; None: all."""

    name: str
    classes: tuple[TrafficClass, ...]
    at_once: int | None = None


def arms_of(comparison: Comparison | None, classes: Sequence[TrafficClass]) -> tuple[Arm, ...]:
    """Return the arms of a comparison, or the only arm where nothing is compared.

    All arms of a comparison send the same requests. The first arm is the one that the others are compared with.
    """
    given = tuple(classes)
    if comparison == "tiers":
        untiered = tuple(c.model_copy(update={"service_tier": None}) for c in given)
        return Arm(WITH_TIERS, given), Arm(WITHOUT_TIERS, untiered)
    if comparison == "batching":
        return Arm(BATCHED, given), Arm(ONE_AT_A_TIME, given, at_once=1)
    return (Arm("load", given),)


@dataclass(slots=True)
class Measurement:
    """The runs of each arm, by the arm's name and in the order of the arms. Only interrupted arms can have none."""

    arms: tuple[Arm, ...]
    runs: dict[str, list[ArmRun]] = field(default_factory=dict)
    was_interrupted: bool = False

    @property
    def measured(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.arms if self.runs[arm.name])

    @property
    def start_s(self) -> float:
        """When the first run began to be measured."""
        return min(run.start_s for runs in self.runs.values() for run in runs)


class Watcher(Protocol):
    """What shows a measurement while it goes on."""

    def show(self, arm: Arm, run: ArmRun, round_: int) -> None: ...


async def measure(target: Target, arms: Sequence[Arm], timing: Timing, seed: int, watcher: Watcher) -> Measurement:
    """Measure all arms, round after round. In the same round, all arms send the same requests.

    Ctrl-C and SIGTERM end it early: what was measured until then is returned. A second one ends it at once.
    """
    measurement = Measurement(tuple(arms), {arm.name: [] for arm in arms})
    rounds = asyncio.ensure_future(_run_rounds(target, measurement, timing, seed, watcher))
    loop = asyncio.get_running_loop()

    def end_early() -> None:
        measurement.was_interrupted = True
        rounds.cancel()
        _restore(loop)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end_early)
    try:
        await rounds
    except asyncio.CancelledError:
        if not measurement.was_interrupted:
            raise
    finally:
        _restore(loop)
    for runs in measurement.runs.values():
        runs[:] = [run for run in runs if run.duration_s > 0]  # others ended before they were measured
    return measurement


def _restore(loop: asyncio.AbstractEventLoop) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if loop.remove_signal_handler(number):
            signal.signal(number, signal.default_int_handler)


async def _run_rounds(target: Target, measurement: Measurement, timing: Timing, seed: int, watcher: Watcher) -> None:
    window = replace(timing.window, drains_closed_loops=True)
    for round_ in range(timing.rounds):
        for arm in measurement.arms:
            await asyncio.sleep(timing.settle_s)
            await run_arm(
                target,
                arm.classes,
                window,
                seed,
                round_,
                at_once=arm.at_once,
                on_start=_starts(measurement.runs[arm.name], arm, round_, watcher),
            )


def _starts(runs: list[ArmRun], arm: Arm, round_: int, watcher: Watcher) -> Callable[[ArmRun], None]:
    def start(run: ArmRun) -> None:
        runs.append(run)
        watcher.show(arm, run, round_)

    return start
