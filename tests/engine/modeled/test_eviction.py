"""The modeled engine lets sequences go in virtual time: what that takes, and that it changes nothing else."""

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
from engine.step_time.model import StepCost
from scheduler.virtual_time import run_virtual
from tests.engine.drive import drive, make_new, random_chunks
from tests.engine.modeled.test_engine import new

T = TypeVar("T")

INFO = EngineInfo("m", 64, 100, 4, 40, max_step_tokens=64, step_eviction=StepEviction.ROWS)
COST = StepCost(step_s=1.0, prefill_token_s=0.1, attend_s=0.0, context_token_s=0.0, decode_s=0.01)
START = StepPlan(0, start=(new("a", 10, max_tokens=9), new("b", 20, max_tokens=9)), run=(Run("a", 10), Run("b", 20)))
TOGETHER_S, A_S, B_S = 4.0, 2.0, 3.0  # what the step takes, with both and with each alone
LAYERS = 10


@dataclass
class Desk:
    engine: ModeledEngine
    result: StepResult | None = None

    async def step(self, plan: StepPlan, *wishes: tuple[float, Collection[str]]) -> StepResult:
        """Runs it; `wishes` are asked so many seconds behind its start."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self.engine.submit(plan)
        for at_s, seq_ids in wishes:
            loop.call_at(started_s + at_s, self.engine.evict, seq_ids)
        result = await self.engine.collect()
        assert loop.time() - started_s == pytest.approx(result.elapsed_s, abs=1e-5), "time really passes"
        return result


def at_desk(story: Callable[[Desk], Awaitable[T]], info: EngineInfo = INFO, **options: Any) -> T:
    async def main() -> T:
        settings = {"noise": 0.0, "timer": LoopTimer(), "num_layers": LAYERS, **options}
        return await story(Desk(ModeledEngine(info, asyncio.sleep, COST, **settings)))

    return run_virtual(main())


def evicted_at(*wishes: tuple[float, Collection[str]], info: EngineInfo = INFO) -> StepResult:
    return at_desk(lambda desk: desk.step(START, *wishes), info)


def test_a_step_that_all_leave_ends_a_layer_later() -> None:
    result = evicted_at((1.0, {"a", "b"}))
    assert result.elapsed_s == pytest.approx(1.0 + TOGETHER_S / LAYERS)
    assert result.evicted == ("a", "b")
    assert [(o.num_computed_tokens, o.token_ids) for o in result.outputs] == [(0, ()), (0, ())]
    assert result.free_blocks == INFO.num_blocks


@pytest.mark.parametrize(("left", "rest_s"), [("a", B_S), ("b", A_S)])
def test_the_rest_of_a_step_costs_what_stays_in_it(left: str, rest_s: float) -> None:
    result = evicted_at((1.0, {left}))
    assert result.elapsed_s == pytest.approx(1.0 + TOGETHER_S / LAYERS + (0.75 - 1 / LAYERS) * rest_s)
    assert result.evicted == (left,)
    assert {o.seq_id: len(o.token_ids) for o in result.outputs} == {"a": left != "a", "b": left != "b"}


def test_one_after_another_leaves() -> None:
    alone = evicted_at((1.0, {"a"})).elapsed_s
    assert evicted_at((1.0, {"a"}), (1.0, {"a"})).elapsed_s == alone, "whoever has left cannot leave again"
    both = evicted_at((1.0, {"a"}), (2.0, {"b"}))
    assert both.evicted == ("a", "b")
    progress = 0.25 + 0.75 * 1.0 / (alone - 1.0)
    assert both.elapsed_s == pytest.approx(2.0 + (alone - 2.0) / (1 - progress) / LAYERS)


def test_whole_steps_go_where_rows_cannot() -> None:
    steps = replace(INFO, step_eviction=StepEviction.STEPS)
    assert evicted_at((1.0, {"a"}), info=steps).evicted == ()
    assert evicted_at((1.0, {"a"}), (2.0, {"b"}), info=steps).evicted == ("a", "b")
    assert evicted_at((1.0, {"a", "b"}), info=replace(INFO, step_eviction=StepEviction.NOTHING)).elapsed_s == TOGETHER_S


def test_in_the_last_layer_it_is_too_late() -> None:
    assert evicted_at((TOGETHER_S * 0.91, {"a", "b"})).evicted == ()
    assert evicted_at((TOGETHER_S * 0.89, {"a", "b"})).evicted == ("a", "b")


def test_a_wish_is_for_one_step() -> None:
    async def story(desk: Desk) -> list[tuple[str, ...]]:
        desk.engine.evict({"a"})  # before any
        evicted = [(await desk.step(START, (0.0, {"a"}))).evicted]
        desk.engine.evict({"a", "b"})  # behind its end
        evicted.append((await desk.step(StepPlan(1, run=(Run("a", 10), Run("b", 1))))).evicted)
        return evicted

    assert at_desk(story) == [("a",), ()]


def test_without_a_timer_nothing_leaves() -> None:
    engine = ModeledEngine(INFO, asyncio.sleep)
    assert engine.info == replace(INFO, step_eviction=StepEviction.NOTHING)


def test_a_cancelled_collect_loses_nothing() -> None:
    async def story(desk: Desk) -> float:
        desk.engine.submit(START)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(desk.engine.collect(), 1.0)
        assert len((await desk.engine.collect()).outputs) == 2
        return asyncio.get_running_loop().time()

    assert at_desk(story) == pytest.approx(TOGETHER_S)


def test_drift_makes_steps_longer_from_then_on() -> None:
    async def story(desk: Desk) -> list[float]:
        await desk.step(START)
        return [(await desk.step(StepPlan(i, run=(Run("a", 1),)))).elapsed_s for i in range(1, 4)]

    elapsed = at_desk(story, drift=lambda now_s: 1.3 if now_s > 5 else 1.0)
    assert elapsed == pytest.approx([1.01, 1.01 * 1.3, 1.01 * 1.3])
    with pytest.raises(ValueError, match="timer"):
        ModeledEngine(INFO, asyncio.sleep, drift=lambda now_s: 1.0)


@dataclass
class Stepper:
    """A modeled engine that a driver steps. It asks a few to leave each step, somewhere in it."""

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
        assert result.free_blocks + self.engine.used_blocks == self.info.num_blocks
        return result

    # -- its timer, whose waits are over at once

    def now(self) -> float:
        return self._now_s

    async def wait_until(self, when_s: float) -> None:
        self._end_s = when_s
        for _ in range(self.rng.randrange(3)):
            self._now_s += self.rng.random() * (self._end_s - self._now_s)
            wished = [i for i in self._ids if self.rng.random() < 0.5] or self._ids
            self.engine.evict([*wished, "nobody"])
            assert self._end_s >= self._now_s
        self._now_s = self._end_s

    def move(self, when_s: float) -> None:
        assert when_s <= self._end_s + 1e-9, "whoever leaves makes a step no longer"
        self._end_s = when_s


def run_shedding(seed: int, step_eviction: StepEviction) -> tuple[dict[str, list[int]], list[StepResult]]:
    rng = random.Random(seed)
    news = [make_new(f"s{i}", [1] * rng.randint(1, 20) + [2 + i], max_tokens=6, seed=i) for i in range(6)]
    stepper = Stepper(rng, step_eviction)
    driven = drive(stepper, news, random_chunks(rng, 9), arrivals_a_step=2)
    assert stepper.engine.used_blocks == 0
    return {k: d.output for k, d in driven.items()}, stepper.trace


@pytest.mark.parametrize("step_eviction", list(StepEviction))
def test_in_such_runs_sequences_do_leave(step_eviction: StepEviction) -> None:
    """Else what follows would compare undisturbed runs."""
    left = [sum(bool(result.evicted) for result in run_shedding(seed, step_eviction)[1]) for seed in range(20)]
    assert sum(left) >= 20 if step_eviction is not StepEviction.NOTHING else sum(left) == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_tokens_and_books_are_what_they_are_when_nobody_leaves(seed: int) -> None:
    undisturbed, _ = run_shedding(seed, StepEviction.NOTHING)
    for step_eviction in (StepEviction.ROWS, StepEviction.STEPS):
        tokens, trace = run_shedding(seed, step_eviction)
        assert tokens == undisturbed
        assert run_shedding(seed, step_eviction)[1] == trace, "law 5"
