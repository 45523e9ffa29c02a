"""Suspended steps of the modeled engine, in virtual time: how long they take, and that tokens stay the same."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interface import EngineInfo, PlanError, Run, StepEnd, StepPlan, StepResult
from engine.modeled.engine import ModeledEngine
from engine.modeled.timer import LoopTimer
from engine.step_time.cost import StepCost
from scheduler.virtual_time import run_virtual
from tests.engine.drive import drive, make_new, random_chunks
from tests.engine.modeled.test_engine import new

T = TypeVar("T")

LAYERS = 10
INFO = EngineInfo("m", 64, 100, 4, 40, max_step_tokens=64, suspends_steps=True, num_layers=LAYERS)
COST = StepCost(step_s=1.0, prefill_token_s=0.1, attend_s=0.0, context_token_s=0.0, decode_s=0.01)
START = StepPlan(0, start=(new("a", 10, max_tokens=9), new("b", 20, max_tokens=9)), run=(Run("a", 10), Run("b", 20)))
STEP_S = 4.0  # seconds that `START` takes
OTHER = StepPlan(1, start=(new("c", 5, max_tokens=9),), run=(Run("c", 5),))
OTHER_S = 1.5


@dataclass
class Bench:
    engine: ModeledEngine

    async def step(self, plan: StepPlan, *suspended_at_s: float) -> StepResult:
        """Run `plan`. Suspension is requested at these times after its start."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self.engine.submit(plan)
        for at_s in suspended_at_s:
            loop.call_at(started_s + at_s, self.engine.suspend)
        result = await self.engine.collect()
        assert loop.time() - started_s == pytest.approx(result.elapsed_s, abs=1e-5), "the clock's time"
        return result


def on_bench(scenario: Callable[[Bench], Awaitable[T]], info: EngineInfo = INFO, **options: Any) -> T:
    async def main() -> T:
        settings = {"noise": 0.0, "timer": LoopTimer(), **options}
        return await scenario(Bench(ModeledEngine(info, asyncio.sleep, COST, **settings)))

    return run_virtual(main())


def test_a_plan_that_comes_after_the_end_of_the_step_before_is_late() -> None:
    async def scenario(bench: Bench) -> list[float]:
        engine = bench.engine
        engine.submit(START)
        engine.submit(StepPlan(1, run=(Run("a", 1),), ahead=True))
        results = [await engine.collect(), await engine.collect()]
        await asyncio.sleep(0.25)
        for is_ahead in (True, False):
            engine.submit(StepPlan(len(results), run=(Run("a", 1),), ahead=is_ahead))
            results.append(await engine.collect())
            await asyncio.sleep(0.25)
        return [result.late_s for result in results]

    ahead = replace(INFO, suspends_steps=False, steps_ahead=1)
    assert on_bench(scenario, ahead) == pytest.approx([0.0, 0.0, 0.25, 0.0]), "the last plan was not made ahead"


def test_a_step_is_suspended_at_the_next_layer_and_takes_no_longer_in_all() -> None:
    async def scenario(bench: Bench) -> list[StepResult]:
        return [
            await bench.step(START, 1.0),
            await bench.step(OTHER, 0.5),
            await bench.step(StepPlan(0, proceed_s=0.5)),
            await bench.step(StepPlan(0, proceed_s=100.0), 1.0),
            await bench.step(StepPlan(0, proceed_s=100.0)),
        ]

    first, other, second, third, last = on_bench(scenario)
    layer_s = STEP_S / LAYERS
    assert [r.end for r in (first, second, third)] == [StepEnd.SUSPENDED] * 3
    assert [r.elapsed_s for r in (first, second, third)] == pytest.approx([3 * layer_s, 2 * layer_s, 3 * layer_s])
    assert not (first.outputs or second.outputs or third.outputs)
    assert (other.end, other.elapsed_s) == (StepEnd.DONE, OTHER_S), "only one step is suspended at a time"
    assert (last.step_id, last.end, len(last.outputs)) == (0, StepEnd.DONE, 2)
    assert sum(r.elapsed_s for r in (first, second, third, last)) == pytest.approx(STEP_S)


def test_a_step_that_goes_on_computes_at_least_one_layer() -> None:
    async def scenario(bench: Bench) -> list[float]:
        await bench.step(START, 1.0)
        return [(await bench.step(StepPlan(0, proceed_s=1e-9))).elapsed_s for _ in range(3)]

    assert on_bench(scenario) == pytest.approx([STEP_S / LAYERS] * 3)


def test_a_dropped_step_leaves_its_sequences_as_they_were() -> None:
    async def scenario(bench: Bench) -> tuple[StepResult, StepResult]:
        await bench.step(START, 1.0)
        dropped = await bench.step(StepPlan(0, drop=True))
        return dropped, await bench.step(StepPlan(2, run=(Run("a", 10), Run("b", 20))))

    dropped, again = on_bench(scenario)
    assert (dropped.end, dropped.elapsed_s, dropped.free_blocks) == (StepEnd.DROPPED, 0.0, INFO.num_blocks)
    assert [(o.num_computed_tokens, o.token_ids) for o in dropped.outputs] == [(0, ()), (0, ())]
    assert again.elapsed_s == pytest.approx(STEP_S) and all(o.token_ids for o in again.outputs)


def test_sequences_of_the_suspended_step_take_part_in_no_other() -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(PlanError, match="no step is suspended"):
            bench.engine.submit(StepPlan(0, proceed_s=1.0))
        await bench.step(START, 1.0)
        for plan in (StepPlan(1, run=(Run("a", 1),)), StepPlan(1, abort=("b",)), replace(OTHER, proceed_s=1.0)):
            with pytest.raises(PlanError, match="suspended step"):
                bench.engine.submit(plan)

    on_bench(scenario)


def test_a_request_in_the_last_layer_is_too_late() -> None:
    assert on_bench(lambda bench: bench.step(START, STEP_S * 0.91)).end is StepEnd.DONE
    assert on_bench(lambda bench: bench.step(START, STEP_S * 0.89)).end is StepEnd.SUSPENDED


def test_a_request_that_comes_as_the_step_begins_is_not_missed() -> None:
    """An answer's end begins a step of bulk, and in virtual time a client's next request comes at the same moment."""

    async def scenario(bench: Bench) -> StepResult:
        bench.engine.submit(START)
        bench.engine.suspend()
        return await bench.engine.collect()

    result = on_bench(scenario)
    assert (result.end, result.elapsed_s) == (StepEnd.SUSPENDED, pytest.approx(STEP_S / LAYERS))


def test_a_request_is_for_one_step() -> None:
    async def scenario(bench: Bench) -> list[StepEnd]:
        bench.engine.suspend()  # before the first step
        ends = [(await bench.step(START)).end]
        bench.engine.suspend()  # after the step's end
        ends.append((await bench.step(StepPlan(1, run=(Run("a", 1), Run("b", 1))))).end)
        return ends

    assert on_bench(scenario) == [StepEnd.DONE, StepEnd.DONE]


def test_nothing_is_suspended_without_a_timer_or_where_the_engine_does_not() -> None:
    assert not ModeledEngine(INFO, asyncio.sleep).info.suspends_steps
    info = replace(INFO, suspends_steps=False)
    assert on_bench(lambda bench: bench.step(START, 1.0), info).elapsed_s == STEP_S


def test_a_cancelled_collect_loses_nothing() -> None:
    async def scenario(bench: Bench) -> float:
        bench.engine.submit(START)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.engine.collect(), 1.0)
        assert len((await bench.engine.collect()).outputs) == 2
        return asyncio.get_running_loop().time()

    assert on_bench(scenario) == pytest.approx(STEP_S)


def test_drift_makes_later_steps_longer() -> None:
    async def scenario(bench: Bench) -> list[float]:
        await bench.step(START)
        return [(await bench.step(StepPlan(i, run=(Run("a", 1),)))).elapsed_s for i in range(1, 4)]

    elapsed = on_bench(scenario, drift=lambda now_s: 1.3 if now_s > 5 else 1.0)
    assert elapsed == pytest.approx([1.01, 1.01 * 1.3, 1.01 * 1.3])
    with pytest.raises(ValueError, match="timer"):
        ModeledEngine(INFO, asyncio.sleep, drift=lambda now_s: 1.0)


@dataclass
class Stepper:
    """A modeled engine that a driver steps.

    With `suspends`, a part of each plan is a step of its own, which runs while the rest is suspended.
    """

    rng: random.Random
    suspends: bool
    trace: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = ModeledEngine(INFO, asyncio.sleep, COST, 0.1, timer=self, prefix_cache=True)
        self.info = self.engine.info
        self._now_s = self._end_s = 0.0
        self._suspends_now = False

    def step(self, plan: StepPlan) -> StepResult:
        first = [run for run in plan.run if self.rng.random() < 0.6] if self.suspends else list(plan.run)
        rest = [run for run in plan.run if run not in first]
        result = self._one(replace(plan, run=tuple(first)), self.suspends)
        results = [result]
        while result.end is StepEnd.SUSPENDED:
            if rest:
                results.append(self._one(StepPlan(-1, run=tuple(rest)), self.suspends))
                rest = []
            choice = {"drop": True} if self.rng.random() < 0.2 else {"proceed_s": self.rng.random() * 5}
            result = self._one(StepPlan(plan.step_id, **choice), self.suspends)
            results.append(result)
        if rest:
            results.append(self._one(StepPlan(-1, run=tuple(rest)), False))
        outputs = {output.seq_id: output for result in results for output in result.outputs}
        return replace(results[-1], step_id=plan.step_id, outputs=tuple(outputs[run.seq_id] for run in plan.run))

    def _one(self, plan: StepPlan, suspends: bool) -> StepResult:
        self._suspends_now = suspends
        self.engine.submit(plan)
        coroutine = self.engine.collect()
        with pytest.raises(StopIteration) as stop:
            coroutine.send(None)
        result: StepResult = stop.value.value
        self.trace.append(result)
        assert result.free_blocks + self.engine.num_used_blocks == self.info.num_blocks
        return result

    # -- the engine's timer: a wait ends at once

    def now(self) -> float:
        return self._now_s

    async def wait_until(self, when_s: float) -> None:
        self._end_s = when_s
        if self._suspends_now and self.rng.random() < 0.5:
            self._now_s += self.rng.random() * (self._end_s - self._now_s)
            self.engine.suspend()
            assert self._end_s >= self._now_s - 1e-9
        self._now_s = max(self._now_s, self._end_s)

    def move(self, when_s: float) -> None:
        assert when_s <= self._end_s + 1e-9, "a suspension never makes a step longer"
        self._end_s = when_s


def run_suspending(seed: int, *, suspends: bool = True) -> tuple[dict[str, list[int]], list[StepResult]]:
    rng = random.Random(seed)
    news = [make_new(f"s{i}", [1] * rng.randint(1, 20) + [2 + i], max_tokens=6, seed=i) for i in range(6)]
    stepper = Stepper(rng, suspends)
    driven = drive(stepper, news, random_chunks(rng, 9), arrivals_a_step=2)
    assert stepper.engine.num_used_blocks == 0
    return {k: d.output for k, d in driven.items()}, stepper.trace


@pytest.mark.parametrize("end", [StepEnd.SUSPENDED, StepEnd.DROPPED])
def test_the_random_runs_do_suspend(end: StepEnd) -> None:
    """Guards the test below: without suspensions it would compare undisturbed runs."""
    assert sum(result.end is end for seed in range(20) for result in run_suspending(seed)[1]) >= 20


@settings(max_examples=settings().max_examples // 4)
@given(seed=st.integers(0, 2**32))
def test_suspension_changes_neither_tokens_nor_blocks(seed: int) -> None:
    undisturbed, _ = run_suspending(seed, suspends=False)
    tokens, trace = run_suspending(seed)
    assert tokens == undisturbed
    assert run_suspending(seed)[1] == trace, "law 5"
