"""The cost of idle requests: the time of an interactive step while N bulk requests are paused or waiting.

Drives the real `SchedulerCore` and an engine step by step. Planning, the engine's step and applying the result are
timed separately. The bulk requests are real: paused requests hold KV blocks of the engine, and waiting requests are
claimed but not started. The cost of a step must not depend on their number.
"""

import cProfile
import io
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.interface import StepPlan
from engine.step_time.cost import StepCost
from engine.step_time.model import StepTimeModel
from loadtest.calibration.stepper import Stepper, greedy
from scheduler.config import TierSet, parse_tiers
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import SchedulerCore
from scheduler.request import Claimed, Request

BULK_PROMPT = 4  # tokens; short, so that the KV of thousands of sequences fits
BULK_TOKENS = 32  # new tokens of a bulk request
INTERACTIVE_PROMPT = 16  # tokens
WARM_UP_STEPS = 3  # steps before the first measured step
PROFILE_LINES = 12  # number of functions in the profile
GATEWAY = "growth"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of each part of a step: lists with one entry for each measured step."""

    claim: list[float]  # to ask the core how many requests to claim, as the loop does after every step
    plan: list[float]
    engine: list[float]
    apply: list[float]

    @property
    def steps(self) -> list[float]:
        """The time of each step: the sum of its four parts."""
        return [sum(parts) for parts in zip(self.claim, self.plan, self.engine, self.apply, strict=True)]


@dataclass(frozen=True, slots=True)
class IdleCost:
    kind: str  # "paused" | "waiting"
    wanted: int  # idle bulk requests that were asked for
    idle: int  # bulk requests in the core; none of them ran in a measured step
    resident: int  # bulk requests that hold KV
    times: StepTimes
    profile: str  # the most expensive functions of planning, by cProfile


class IdleCostBench:
    """The measurement of interactive requests, one after another, while `count` bulk requests are idle.

    `kind` is "paused" or "waiting". Uses one scheduler core and one engine.
    """

    def __init__(self, engine: Stepper, count: int, kind: str) -> None:
        if kind not in ("paused", "waiting"):
            raise ValueError(f"bulk is paused or waiting, not {kind}")
        self._engine = engine
        self._count = count
        self._kind = kind
        tiers = _tiers(max(count, 1))
        self._core = SchedulerCore(
            tiers, engine.info, SLAController(tiers, engine.info.step_eviction, engine.info.num_layers), _KnownCost()
        )
        self._now = 0.0
        self._fence = 0

    def measure(self, steps: int) -> IdleCost:
        """Return the times of `steps` interactive steps.

        Each step computes the prompt of one interactive request and yields its first token. No bulk runs meanwhile.
        """
        if self._kind == "paused":
            self._accept("bulk", self._count, BULK_PROMPT, BULK_TOKENS)
            self._run_first_tokens()
        self._accept("first", 1, INTERACTIVE_PROMPT, 1, tier="realtime")
        self._step(lambda seconds: None)
        if self._kind == "waiting":
            self._accept("bulk", self._count, BULK_PROMPT, BULK_TOKENS)
        times = StepTimes([], [], [], [])
        for number in range(WARM_UP_STEPS + steps):
            measured = self._interactive_step(number)
            if number >= WARM_UP_STEPS:
                for taken, seconds in zip(_parts(times), measured, strict=True):
                    taken.append(seconds)
        profile = self._profile(steps)
        held = [s for s in self._core.states if s.tier.name == "bulk"]
        resident = sum(s.is_resident for s in held)
        self._finish()
        return IdleCost(self._kind, self._count, len(held), resident, times, profile)

    def _interactive_step(self, number: int) -> list[float]:
        self._accept(f"chat-{number}", 1, INTERACTIVE_PROMPT, 1, tier="realtime")
        taken: list[float] = []
        plan = self._step(taken.append)
        if any(run.seq_id.startswith("bulk") for run in plan.run):
            raise RuntimeError("bulk ran in a step that should have been interactive alone")
        return taken

    def _profile(self, steps: int) -> str:
        profiler = cProfile.Profile()
        for number in range(steps):
            self._accept(f"profiled-{number}", 1, INTERACTIVE_PROMPT, 1, tier="realtime")
            profiler.enable()
            plan = self._core.plan(self._now)
            profiler.disable()
            self._core.apply(self._engine.step(plan), self._now)
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
        return "\n".join(_shortened(line) for line in text.getvalue().splitlines() if line.strip())

    def _run_first_tokens(self) -> None:
        """Run bulk until every sequence has its first token, and therefore holds KV."""
        while any(not s.output_token_ids for s in self._core.states):
            self._step(lambda seconds: None)

    def _step(self, note: Callable[[float], None]) -> StepPlan:
        """Plan, run and apply one step. `note` is called with the seconds of each part: claim, plan, engine, apply."""
        self._now += 0.01
        began_s = time.perf_counter()
        self._core.claim_limits(self._now)
        started_s = time.perf_counter()
        plan = self._core.plan(self._now)
        planned_s = time.perf_counter()
        result = self._engine.step(plan)
        stepped_s = time.perf_counter()
        self._core.apply(result, self._now)
        applied_s = time.perf_counter()
        for seconds in (started_s - began_s, planned_s - started_s, stepped_s - planned_s, applied_s - stepped_s):
            note(seconds)
        return plan

    def _accept(self, name: str, count: int, prompt: int, max_tokens: int, tier: str = "bulk") -> None:
        claimed = []
        for i in range(count):
            self._fence += 1
            request_id = f"{name}-{i}"
            token_ids = tuple(16 + (i + j) % 64 for j in range(prompt))
            now_ms = int(self._now * 1000)
            request = Request(request_id, tier, token_ids, greedy(max_tokens), now_ms, now_ms + 10_000, GATEWAY)
            claimed.append(Claimed(request, self._fence))
        self._core.accept(claimed, self._now, int(self._now * 1000))

    def _finish(self) -> None:
        """Remove every sequence from the engine."""
        self._core.cancel([s.id for s in self._core.states])
        self._engine.step(self._core.plan(self._now))


class _KnownCost(StepTimeModel):
    """A step-time model that learns nothing, so that plans do not depend on this machine's speed.

    A decode costs as much as an empty step. So a bulk decode would make the step of an interactive prompt twice as
    long, and the planner adds no bulk to that step.
    """

    def __init__(self) -> None:
        super().__init__(StepCost(step_s=1e-3, prefill_token_s=0.0, decode_s=1e-3))

    def observe(self, work: Any, elapsed_s: float) -> None:
        pass


def _parts(times: StepTimes) -> tuple[list[float], ...]:
    return (times.claim, times.plan, times.engine, times.apply)


def _tiers(batch_size: int) -> TierSet:
    """Return an interactive tier with SLOs that are never missed, and a bulk tier for `batch_size` sequences a step."""
    knob = {"min": batch_size, "start": batch_size, "max": batch_size}
    no_wait = {"min": 0, "start": 0, "max": 0}
    interactive = {
        "priority": 100,
        "service_tiers": ["default"],
        "slo": {"ttft_p99_ms": 60_000, "itl_p99_ms": 60_000},
        "max_slowdown": 1,  # so that no bulk rides along
        "max_wait_ms": no_wait,
    }
    bulk = {"priority": 10, "service_tiers": ["flex"], "batch_size": knob, "max_wait_ms": no_wait}
    both = {"realtime": interactive, "bulk": bulk}
    return parse_tiers({"default_tier": "realtime", "batch_tier": "bulk", "tiers": both})


def _shortened(line: str) -> str:
    """Return a line of a profile with the file's name in place of its full path."""
    head, separator, place = line.rpartition(" ")
    return f"{head}{separator}{Path(place).name}" if "/" in place else line
