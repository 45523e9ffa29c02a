"""The hand-over between an event loop and an engine that blocks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from engine.engine_thread import EngineThread
from engine.interface import EngineDead, EngineInfo, PlanError, StepPlan, StepResult

INFO = EngineInfo("none", max_model_len=8, vocab_size=4, block_size=4, num_blocks=2, max_step_tokens=8)


class FakeStepper:
    """Answers every plan with `answer(plan)`; notes on which threads it ran."""

    def __init__(self, answer: Callable[[StepPlan], None] = lambda plan: None) -> None:
        self.info = INFO
        self.threads: set[int] = set()
        self.num_closed = 0
        self._answer = answer

    def step(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.get_ident())
        self._answer(plan)
        return StepResult(plan.step_id)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.num_closed += 1


@asynccontextmanager
async def serving(stepper: FakeStepper) -> AsyncIterator[EngineThread]:
    engine = EngineThread(stepper)
    try:
        yield engine
    finally:
        engine.close()


async def test_steps_run_in_order_on_one_thread_of_their_own() -> None:
    stepper = FakeStepper()
    async with serving(stepper) as engine:
        assert engine.info is INFO
        for step_id in range(20):
            engine.submit(StepPlan(step_id))
            assert (await engine.collect()).step_id == step_id
    assert len(stepper.threads) == 1
    assert threading.get_ident() not in stepper.threads
    assert stepper.num_closed == 1


async def test_submit_returns_while_the_step_runs() -> None:
    release = threading.Event()
    async with serving(FakeStepper(lambda plan: assert_set(release))) as engine:
        engine.submit(StepPlan(1))
        with pytest.raises(RuntimeError, match="in flight already"):
            engine.submit(StepPlan(2))
        release.set()
        assert (await engine.collect()).step_id == 1


def assert_set(event: threading.Event) -> None:
    assert event.wait(timeout=10)


async def test_a_cancelled_collect_loses_nothing() -> None:
    release = threading.Event()
    async with serving(FakeStepper(lambda plan: assert_set(release))) as engine:
        engine.submit(StepPlan(5))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.collect(), timeout=0.01)
        release.set()
        assert (await engine.collect()).step_id == 5


async def test_a_plan_error_is_reported_and_survived() -> None:
    def refuse(plan: StepPlan) -> None:
        if plan.step_id == 1:
            raise PlanError("no such sequence")

    async with serving(FakeStepper(refuse)) as engine:
        engine.submit(StepPlan(1))
        with pytest.raises(PlanError, match="no such sequence"):
            await engine.collect()
        engine.submit(StepPlan(2))
        assert (await engine.collect()).step_id == 2


class NotAnException(BaseException):
    pass


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, NotAnException])
async def test_any_other_error_is_the_engines_end(kind: type[BaseException]) -> None:
    def break_down(plan: StepPlan) -> None:
        raise kind("device lost")

    stepper = FakeStepper(break_down)
    async with serving(stepper) as engine:
        engine.submit(StepPlan(1))
        with pytest.raises(EngineDead, match="device lost"):
            await engine.collect()
        with pytest.raises(EngineDead):
            engine.submit(StepPlan(2))
        with pytest.raises(EngineDead):
            await engine.collect()
    assert stepper.num_closed == 1


async def test_close_finishes_the_step_in_flight_and_may_be_repeated() -> None:
    stepper = FakeStepper()
    engine = EngineThread(stepper)
    engine.submit(StepPlan(1))
    engine.close()
    engine.close()
    assert stepper.num_closed == 1
    assert (await engine.collect()).step_id == 1
    with pytest.raises(EngineDead):
        engine.submit(StepPlan(2))


async def test_collecting_nothing_is_a_mistake() -> None:
    async with serving(FakeStepper()) as engine:
        with pytest.raises(RuntimeError, match="submit one first"):
            await engine.collect()
