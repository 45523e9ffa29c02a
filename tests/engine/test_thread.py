"""The engine's thread: an engine that blocks, driven from an event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from engine.interface import EngineDead, EngineInfo, PlanError, StepEnd, StepPlan, StepResult
from engine.suspension import StepDropped, Suspender
from engine.thread import EngineThread

INFO = EngineInfo("none", max_model_len=8, vocab_size=4, block_size=4, num_blocks=2, max_step_tokens=8)


class FakeStepper:
    """Calls `answer(plan)` when a step is launched; records the threads it ran on. Steps end with `finish`.

    With `steps_ahead`, a step may be launched while another one has not ended. Without, steps end by themselves.
    """

    def __init__(self, answer: Callable[[StepPlan], None] = lambda plan: None, **info: Any) -> None:
        self.info = replace(INFO, **info)
        self.threads: set[int] = set()
        self.num_closed = 0
        self.has_ended = False
        self.launched: list[int] = []
        self.device_error: Exception | None = None
        self._let_finish = threading.Event()
        self._on_finished: Callable[[], None] = lambda: None
        if not self.info.steps_ahead:
            self._let_finish.set()
        self._answer = answer
        self._in_flight: deque[int] = deque()

    def compile_grammar(self, grammar: str) -> object:
        return grammar, threading.current_thread().name

    def check_alive(self) -> None:
        if self.has_ended:
            raise ConnectionError("what computes is gone")

    def launch(self, plan: StepPlan) -> None:
        self.threads.add(threading.get_ident())
        self._answer(plan)
        self.launched.append(plan.step_id)
        self._in_flight.append(plan.step_id)

    @property
    def is_finished(self) -> bool:
        if self.device_error is not None:
            raise self.device_error
        return self._let_finish.is_set()

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        self._on_finished = callback

    def finish(self, error: Exception | None = None) -> None:
        """Let all steps end, or fail with `error`."""
        self.device_error = error
        self._let_finish.set()
        self._on_finished()

    def finalize(self) -> StepResult:
        wait_for(self._let_finish)
        if self.device_error is not None:
            raise self.device_error
        return StepResult(self._in_flight.popleft())

    def suspend_by(self, suspender: Suspender) -> None:
        """Do nothing: the steps have no layers."""

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.num_closed += 1


class InTurn(FakeStepper):
    """Each call of `finish` lets one more step end."""

    def __init__(self, answer: Callable[[StepPlan], None] = lambda plan: None) -> None:
        super().__init__(answer, steps_ahead=1)
        self._num_ended = self._num_finalized = 0
        self._ended = threading.Condition()

    @property
    def is_finished(self) -> bool:
        return self._num_ended > self._num_finalized

    def finish(self, error: Exception | None = None) -> None:
        with self._ended:
            self._num_ended += 1
            self._ended.notify()
        self._on_finished()

    def finalize(self) -> StepResult:
        with self._ended:
            assert self._ended.wait_for(lambda: self.is_finished, timeout=30)
        self._num_finalized += 1
        return StepResult(self._in_flight.popleft())


@asynccontextmanager
async def running(stepper: FakeStepper) -> AsyncIterator[EngineThread]:
    engine = EngineThread(lambda: stepper)
    try:
        yield engine
    finally:
        engine.close()


async def test_the_engine_is_made_and_steps_run_in_order_on_one_thread_of_their_own() -> None:
    stepper, made_on = FakeStepper(), set[int]()

    def make() -> FakeStepper:
        made_on.add(threading.get_ident())
        return stepper

    engine = EngineThread(make)
    assert engine.info is stepper.info
    for step_id in range(20):
        engine.submit(StepPlan(step_id))
        assert (await engine.collect()).step_id == step_id
    engine.close()
    assert made_on == stepper.threads != {threading.get_ident()}
    assert (len(stepper.threads), stepper.num_closed) == (1, 1)


async def test_a_grammar_is_compiled_on_another_thread_while_a_step_runs() -> None:
    may_end = threading.Event()
    stepper = FakeStepper(lambda plan: may_end.wait(60) and None)
    async with running(stepper) as engine:
        engine.submit(StepPlan(1))
        compiled = await engine.compile_grammar("a")
        may_end.set()
        await engine.collect()
    assert compiled == ("a", "grammar_0")


def test_an_error_while_the_engine_is_made_is_raised() -> None:
    def fail() -> FakeStepper:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        EngineThread(fail)


def wait_for(event: threading.Event) -> None:
    assert event.wait(timeout=60)


async def test_a_cancelled_collect_of_a_running_step_loses_nothing() -> None:
    release = threading.Event()
    async with running(FakeStepper(lambda plan: wait_for(release))) as engine:
        engine.submit(StepPlan(5))
        with pytest.raises(RuntimeError, match="in flight already"):
            engine.submit(StepPlan(6))
        collecting = asyncio.create_task(engine.collect())
        await asyncio.sleep(0)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        release.set()
        assert (await engine.collect()).step_id == 5


class NotAnException(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, NotAnException])
async def test_any_other_error_ends_the_engine(error: type[BaseException]) -> None:
    def break_down(plan: StepPlan) -> None:
        raise error("device lost")

    stepper = FakeStepper(break_down)
    async with running(stepper) as engine:
        engine.submit(StepPlan(1))
        with pytest.raises(EngineDead, match="device lost"):
            await engine.collect()
        with pytest.raises(EngineDead):
            engine.submit(StepPlan(2))
        with pytest.raises(EngineDead):
            await engine.collect()
        with pytest.raises(EngineDead, match="device lost"):
            engine.check_alive()
    assert stepper.num_closed == 1


async def test_what_ends_between_steps_ends_the_engine() -> None:
    stepper = FakeStepper()
    async with running(stepper) as engine:
        engine.check_alive()
        stepper.has_ended = True
        with pytest.raises(EngineDead, match="what computes is gone"):
            engine.check_alive()
        with pytest.raises(EngineDead):
            engine.submit(StepPlan(1))


async def test_close_finishes_the_step_in_flight_and_may_be_repeated() -> None:
    stepper = FakeStepper()
    engine = EngineThread(lambda: stepper)
    engine.submit(StepPlan(1))
    engine.close()
    engine.close()
    assert stepper.num_closed == 1
    assert (await engine.collect()).step_id == 1
    with pytest.raises(EngineDead):
        engine.submit(StepPlan(2))


async def test_collecting_without_a_submitted_step_raises() -> None:
    async with running(FakeStepper()) as engine:
        with pytest.raises(RuntimeError, match="submit one first"):
            await engine.collect()


async def test_an_async_plan_is_launched_while_the_step_before_it_runs() -> None:
    launcher = FakeStepper(steps_ahead=1)
    async with running(launcher) as engine:
        engine.submit(StepPlan(1))
        with pytest.raises(RuntimeError, match="in flight already"):
            engine.submit(StepPlan(2))
        engine.submit(StepPlan(2, ahead=True))
        while launcher.launched != [1, 2]:
            await asyncio.sleep(0)
        launcher.finish()
        assert [(await engine.collect()).step_id for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("ends", ["later", "during the launch", "before"])
async def test_a_step_that_is_launched_after_the_end_of_the_one_before_it_says_how_late_it_is(ends: str) -> None:
    def launch(plan: StepPlan) -> None:
        if plan.step_id == 2 and ends == "during the launch":
            launcher.finish()

    launcher = InTurn(launch)
    async with running(launcher) as engine:
        engine.submit(StepPlan(1))
        if ends == "before":
            launcher.finish()
        engine.submit(StepPlan(2, ahead=True))
        while launcher.launched != [1, 2]:
            await asyncio.sleep(0)
        if ends == "later":
            launcher.finish()
        first = await engine.collect()
        launcher.finish()
        second = await engine.collect()
    assert first.late_s == 0
    assert (second.late_s > 0) == (ends != "later")


async def test_a_step_that_is_computed_while_it_is_launched_is_not_late() -> None:
    """As a step with log probabilities is: only a launched step tells of its end."""
    launcher = FakeStepper(steps_ahead=1)
    launcher.finish()  # no later step tells of its end
    async with running(launcher) as engine:
        engine.submit(StepPlan(1))
        first = await engine.collect()
        engine.submit(StepPlan(2, ahead=True))
        second = await engine.collect()
    assert (first.late_s, second.late_s) == (0, 0)


async def test_closing_finalizes_launched_steps() -> None:
    launcher = FakeStepper(steps_ahead=1)
    launcher.finish()
    async with running(launcher) as engine:
        engine.submit(StepPlan(1))
        engine.submit(StepPlan(2, ahead=True))
        engine.close()
        assert [(await engine.collect()).step_id for _ in range(2)] == [1, 2]
    assert launcher.num_closed == 1


@pytest.mark.parametrize(
    ("error", "waits", "kind"),
    [(PlanError("no"), False, PlanError), (OSError("gone"), False, EngineDead), (OSError("gone"), True, EngineDead)],
)
async def test_an_error_of_a_launch_is_raised_for_its_own_step_or_the_one_before_it(
    error: Exception, waits: bool, kind: type[Exception]
) -> None:
    """`waits`: the step before it is still in flight, and ends with the engine."""

    def refuse(plan: StepPlan) -> None:
        if plan.step_id == 2:
            raise error

    launcher = FakeStepper(refuse, steps_ahead=1)
    async with running(launcher) as engine:
        engine.submit(StepPlan(1))
        if not waits:
            launcher.finish()
            assert (await engine.collect()).step_id == 1
        engine.submit(StepPlan(2, ahead=True))
        with pytest.raises(kind):
            await engine.collect()


@pytest.mark.parametrize("num_steps", [1, 2])
async def test_an_error_of_the_device_while_steps_run_ends_the_engine(num_steps: int) -> None:
    """With one step, the thread asks whether it has finished; with two, it waits for the first one."""
    launcher = FakeStepper(steps_ahead=1)
    async with running(launcher) as engine:
        for step_id in range(num_steps):
            engine.submit(StepPlan(step_id, ahead=step_id > 0))
        while len(launcher.launched) < num_steps:
            await asyncio.sleep(0)
        launcher.finish(RuntimeError("an illegal memory access"))
        for _ in range(2):
            with pytest.raises(EngineDead, match="a step failed.*illegal memory access|the engine has stopped"):
                await engine.collect()
        with pytest.raises(EngineDead, match="illegal memory access"):
            engine.check_alive()
    assert launcher.num_closed == 1


class Layered(FakeStepper):
    """Steps of three layers. `answer(plan)` is called in the first; `events` tells which layers ran."""

    def __init__(self, answer: Callable[[StepPlan], None] = lambda plan: None) -> None:
        super().__init__(answer, suspends_steps=True)
        self.events: list[tuple[int, int | str]] = []  # (step, layer or what happened)
        self._results: list[StepResult] = []
        self._is_suspended = False

    def suspend_by(self, suspender: Suspender) -> None:
        self._suspender = suspender

    @property
    def is_finished(self) -> bool:
        return bool(self._results)

    def launch(self, plan: StepPlan) -> None:
        if plan.is_of_suspended:
            raise PlanError("no step is suspended")
        self._answer(plan)
        for layer in range(3):
            if not self._is_suspended and self._suspender.is_due():
                self._is_suspended = True
                try:
                    self._suspender.wait(StepResult(plan.step_id, end=StepEnd.SUSPENDED))
                except StepDropped:
                    self.events.append((plan.step_id, "dropped"))
                    self._results.append(StepResult(plan.step_id, end=StepEnd.DROPPED))
                    return
                except RuntimeError as error:  # as a step that computes itself in pieces if memory runs out
                    raise AssertionError("another step's error was taken for this step's") from error
                finally:
                    self._is_suspended = False
            self.events.append((plan.step_id, layer))
        self._results.append(StepResult(plan.step_id))

    def finalize(self) -> StepResult:
        return self._results.pop(0)


@asynccontextmanager
async def suspended(
    answer: Callable[[StepPlan], None] = lambda plan: None,
) -> AsyncIterator[tuple[EngineThread, Layered]]:
    """An engine whose step 1 is suspended before its first layer."""
    is_asked = threading.Event()

    def launched(plan: StepPlan) -> None:
        wait_for(is_asked)
        answer(plan)

    stepper = Layered(launched)
    async with running(stepper) as engine:
        engine.suspend()  # no step is in flight: no effect
        engine.submit(StepPlan(1))
        engine.suspend()
        is_asked.set()
        assert await engine.collect() == StepResult(1, end=StepEnd.SUSPENDED)
        yield engine, stepper


async def test_other_steps_run_while_one_is_suspended() -> None:
    async with suspended() as (engine, stepper):
        for step_id in (2, 3):
            engine.submit(StepPlan(step_id))
            engine.suspend()  # another step is suspended: no effect
            assert await engine.collect() == StepResult(step_id)
        engine.submit(StepPlan(1, proceed_s=100.0))
        assert await engine.collect() == StepResult(1)
        engine.submit(StepPlan(4))
        assert await engine.collect() == StepResult(4), "the request was for another step"
    assert stepper.events == [(step, layer) for step in (2, 3, 1, 4) for layer in range(3)]


async def test_a_step_goes_on_for_a_given_time_or_until_it_is_suspended_again() -> None:
    async with suspended() as (engine, stepper):
        for ran in range(1, 4):
            engine.submit(StepPlan(1, proceed_s=1e-9))
            assert (await engine.collect()).end is (StepEnd.SUSPENDED if ran < 3 else StepEnd.DONE)
            assert stepper.events == [(1, layer) for layer in range(ran)], "one layer each time"
        engine.submit(StepPlan(2))
        assert await engine.collect() == StepResult(2), "the time was that of another step"


async def test_a_dropped_step_ends_at_once() -> None:
    async with suspended() as (engine, stepper):
        engine.submit(StepPlan(1, drop=True))
        assert await engine.collect() == StepResult(1, end=StepEnd.DROPPED)
        engine.submit(StepPlan(2, proceed_s=1.0))
        with pytest.raises(PlanError, match="no step is suspended"):
            await engine.collect()
    assert stepper.events == [(1, "dropped")]


async def test_a_refused_plan_leaves_the_step_suspended() -> None:
    async with suspended(raising(PlanError("no such sequence"))) as (engine, _):
        engine.submit(StepPlan(2))
        with pytest.raises(PlanError, match="no such sequence"):
            await engine.collect()
        engine.submit(StepPlan(1, proceed_s=100.0))
        assert await engine.collect() == StepResult(1)


async def test_an_error_beside_a_suspended_step_ends_the_engine() -> None:
    async with suspended(raising(RuntimeError("out of memory"))) as (engine, stepper):
        engine.submit(StepPlan(2))
        with pytest.raises(EngineDead, match="out of memory"):
            await engine.collect()
    assert stepper.num_closed == 1


def raising(error: Exception) -> Callable[[StepPlan], None]:
    """Return what raises `error` in step 2."""

    def answer(plan: StepPlan) -> None:
        if plan.step_id == 2:
            raise error

    return answer


async def test_an_engine_closes_while_a_step_is_suspended() -> None:
    async with suspended() as (_, stepper):
        pass
    assert stepper.events == [(1, "dropped")] and stepper.num_closed == 1


async def test_an_engine_that_suspends_no_steps_gets_no_request() -> None:
    stepper = FakeStepper()
    async with running(stepper) as engine:
        engine.submit(StepPlan(1))
        engine.suspend()
        assert (await engine.collect()).end is StepEnd.DONE
