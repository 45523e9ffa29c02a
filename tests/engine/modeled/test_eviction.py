"""Mid-step eviction in the modeled engine, in virtual time: how long a step takes, and that tokens stay the same."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interface import EngineInfo, Run, StepEviction, StepPlan, StepResult
from engine.modeled.engine import ModeledEngine
from engine.modeled.timer import LoopTimer
from engine.step_time.cost import StepCost
from scheduler.virtual_time import run_virtual
from tests.engine.drive import drive, make_new, random_chunks
from tests.engine.modeled.test_engine import new

T = TypeVar("T")

LAYERS = 10
INFO = EngineInfo("m", 64, 100, 4, 40, max_step_tokens=64, step_eviction=StepEviction.ROWS, num_layers=LAYERS)
COST = StepCost(step_s=1.0, prefill_token_s=0.1, attend_s=0.0, context_token_s=0.0, decode_s=0.01)
START = StepPlan(0, start=(new("a", 10, max_tokens=9), new("b", 20, max_tokens=9)), run=(Run("a", 10), Run("b", 20)))
TOGETHER_S, A_S, B_S = 4.0, 2.0, 3.0  # seconds of the step with both sequences, and with each alone


@dataclass
class Bench:
    engine: ModeledEngine
    result: StepResult | None = None

    async def step(self, plan: StepPlan, *evictions: tuple[float, Collection[str]]) -> StepResult:
        """Run `plan`. Each eviction is requested so many seconds after the step's start."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self.engine.submit(plan)
        for at_s, seq_ids in evictions:
            loop.call_at(started_s + at_s, self.engine.evict, seq_ids)
        result = await self.engine.collect()
        assert loop.time() - started_s == pytest.approx(result.elapsed_s, abs=1e-5), "the clock's time"
        return result


def on_bench(scenario: Callable[[Bench], Awaitable[T]], info: EngineInfo = INFO, **options: Any) -> T:
    async def main() -> T:
        settings = {"noise": 0.0, "timer": LoopTimer(), **options}
        return await scenario(Bench(ModeledEngine(info, asyncio.sleep, COST, **settings)))

    return run_virtual(main())


def step_with(*evictions: tuple[float, Collection[str]], info: EngineInfo = INFO) -> StepResult:
    return on_bench(lambda bench: bench.step(START, *evictions), info)


def test_a_step_without_remaining_sequences_ends_one_layer_later() -> None:
    result = step_with((1.0, {"a", "b"}))
    assert result.elapsed_s == pytest.approx(1.0 + TOGETHER_S / LAYERS)
    assert result.evicted == ("a", "b")
    assert [(o.num_computed_tokens, o.token_ids) for o in result.outputs] == [(0, ()), (0, ())]
    assert result.free_blocks == INFO.num_blocks


@pytest.mark.parametrize(("evictee", "rest_s"), [("a", B_S), ("b", A_S)])
def test_the_rest_of_a_step_costs_what_remains_in_it(evictee: str, rest_s: float) -> None:
    result = step_with((1.0, {evictee}))
    assert result.elapsed_s == pytest.approx(1.0 + TOGETHER_S / LAYERS + (0.75 - 1 / LAYERS) * rest_s)
    assert result.evicted == (evictee,)
    assert {o.seq_id: len(o.token_ids) for o in result.outputs} == {"a": evictee != "a", "b": evictee != "b"}


def test_sequences_are_evicted_one_after_another() -> None:
    alone = step_with((1.0, {"a"})).elapsed_s
    assert step_with((1.0, {"a"}), (1.0, {"a"})).elapsed_s == alone, "the second request changes nothing"
    both = step_with((1.0, {"a"}), (2.0, {"b"}))
    assert both.evicted == ("a", "b")
    progress = 0.25 + 0.75 * 1.0 / (alone - 1.0)
    assert both.elapsed_s == pytest.approx(2.0 + (alone - 2.0) / (1 - progress) / LAYERS)


def test_only_whole_steps_are_evicted_where_rows_cannot_be() -> None:
    steps = replace(INFO, step_eviction=StepEviction.STEPS)
    assert step_with((1.0, {"a"}), info=steps).evicted == ()
    assert step_with((1.0, {"a"}), (2.0, {"b"}), info=steps).evicted == ("a", "b")
    assert step_with((1.0, {"a", "b"}), info=replace(INFO, step_eviction=StepEviction.NOTHING)).elapsed_s == TOGETHER_S


def test_a_request_in_the_last_layer_is_too_late() -> None:
    assert step_with((TOGETHER_S * 0.91, {"a", "b"})).evicted == ()
    assert step_with((TOGETHER_S * 0.89, {"a", "b"})).evicted == ("a", "b")


def test_a_request_is_for_one_step() -> None:
    async def scenario(bench: Bench) -> list[tuple[str, ...]]:
        bench.engine.evict({"a"})  # before the first step
        evicted = [(await bench.step(START, (0.0, {"a"}))).evicted]
        bench.engine.evict({"a", "b"})  # after the step's end
        evicted.append((await bench.step(StepPlan(1, run=(Run("a", 10), Run("b", 1))))).evicted)
        return evicted

    assert on_bench(scenario) == [("a",), ()]


def test_without_a_timer_nothing_is_evicted() -> None:
    engine = ModeledEngine(INFO, asyncio.sleep)
    assert engine.info == replace(INFO, step_eviction=StepEviction.NOTHING)


def test_a_cancelled_collect_loses_nothing() -> None:
    async def scenario(bench: Bench) -> float:
        bench.engine.submit(START)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.engine.collect(), 1.0)
        assert len((await bench.engine.collect()).outputs) == 2
        return asyncio.get_running_loop().time()

    assert on_bench(scenario) == pytest.approx(TOGETHER_S)


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
    """A modeled engine that a driver steps. Each step evicts some of its sequences at random instants."""

    rng: random.Random
    step_eviction: StepEviction
    info: EngineInfo = INFO
    trace: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.info = replace(self.info, step_eviction=self.step_eviction)
        self.engine = ModeledEngine(self.info, asyncio.sleep, COST, 0.1, timer=self, prefix_cache=True)
        self._now_s = 0.0
        self._end_s = 0.0
        self._ids: list[str] = []

    def step(self, plan: StepPlan) -> StepResult:
        self._ids = [run.seq_id for run in plan.run]
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
        for _ in range(self.rng.randrange(3)):
            self._now_s += self.rng.random() * (self._end_s - self._now_s)
            evictees = [i for i in self._ids if self.rng.random() < 0.5] or self._ids
            self.engine.evict([*evictees, "unknown"])
            assert self._end_s >= self._now_s
        self._now_s = self._end_s

    def move(self, when_s: float) -> None:
        assert when_s <= self._end_s + 1e-9, "an eviction never makes a step longer"
        self._end_s = when_s


def run_evicting(seed: int, step_eviction: StepEviction) -> tuple[dict[str, list[int]], list[StepResult]]:
    rng = random.Random(seed)
    news = [make_new(f"s{i}", [1] * rng.randint(1, 20) + [2 + i], max_tokens=6, seed=i) for i in range(6)]
    stepper = Stepper(rng, step_eviction)
    driven = drive(stepper, news, random_chunks(rng, 9), arrivals_a_step=2)
    assert stepper.engine.num_used_blocks == 0
    return {k: d.output for k, d in driven.items()}, stepper.trace


@pytest.mark.parametrize("step_eviction", list(StepEviction))
def test_the_random_runs_do_evict(step_eviction: StepEviction) -> None:
    """Guards the test below: without evictions it would compare undisturbed runs."""
    evicted = [sum(bool(result.evicted) for result in run_evicting(seed, step_eviction)[1]) for seed in range(20)]
    assert sum(evicted) >= 20 if step_eviction is not StepEviction.NOTHING else sum(evicted) == 0


@settings(max_examples=settings().max_examples // 4)
@given(seed=st.integers(0, 2**32))
def test_eviction_changes_neither_tokens_nor_blocks(seed: int) -> None:
    undisturbed, _ = run_evicting(seed, StepEviction.NOTHING)
    for step_eviction in (StepEviction.ROWS, StepEviction.STEPS):
        tokens, trace = run_evicting(seed, step_eviction)
        assert tokens == undisturbed
        assert run_evicting(seed, step_eviction)[1] == trace, "law 5"
