"""Runs an engine's blocking steps on their own thread, so that the event loop never waits for a device.

Knows threads and futures; does not know what a step computes. Steps run one at a time in the order of submission. With
async scheduling (`EngineInfo.steps_ahead`), the next step is launched while the previous step is still running.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Protocol

from engine.interface import EngineDead, EngineInfo, PlanError, StepPlan, StepResult
from engine.suspension import StepDropped, Suspender


class Stepper(Protocol):
    """An engine whose methods block.

    `launch` starts a step. With async scheduling (`info.steps_ahead` ≥ 1), it returns while the device computes the
    step; otherwise it may compute the whole step. `finalize` waits for the oldest launched step and returns its result.
    """

    @property
    def info(self) -> EngineInfo: ...

    def launch(self, plan: StepPlan) -> None: ...

    @property
    def is_finished(self) -> bool:
        """True if `finalize` would return without waiting."""
        ...

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        """From now on, call `callback` whenever a launched step may have finished or failed, on any thread."""
        ...

    def finalize(self) -> StepResult: ...

    def compile_grammar(self, grammar: str) -> object:
        """Compile a grammar. May be called from another thread than `launch`, also during a step."""
        ...

    def check_alive(self) -> None:
        """Raise an error if what computes has ended. May be called from another thread than `launch`."""
        ...

    def suspend_by(self, suspender: Suspender) -> None:
        """From now on, ask `suspender` between the layers of each step, if `info.suspends_steps`.

        While one step is suspended, the others are computed inside `Suspender.wait`, and are not suspended.
        """
        ...

    def close(self) -> None: ...


class EngineThread:
    """An `Engine` that runs a `Stepper` on its own thread. Call `submit` and `collect` from one event loop.

    If a step raises `PlanError`, `collect` raises the same error and the engine continues. Any other error of a step
    ends the thread: `collect` and all later calls of `submit` and `collect` raise `EngineDead`.
    """

    def __init__(self, make: Callable[[], Stepper]) -> None:
        """Start the thread and wait until `make`, which runs on it, has made the stepper. Raises the errors of `make`.

        The same thread makes the stepper and runs its steps, because OpenMP gives each computing thread its own thread
        pool. If the pools have more threads than there are cores, every operator has to wake its threads up.
        """
        made: Future[Stepper] = Future()
        self._inbox: SimpleQueue[_Submitted | _Signal] = SimpleQueue()
        self._pending: deque[_Submitted] = deque()
        self._death: BaseException | None = None
        self._is_closed = False
        self._ended_s = 0.0  # time by `perf_counter` at which a launched step was last seen to have ended
        self._num_ends = 0  # launched steps that were seen to have ended
        self._launched: deque[_Reply] = deque()  # of the engine's thread: replies of steps that have no result yet
        self._to_suspend: _Reply | None = None  # of the step that is to be suspended
        self._suspends_at_s = inf  # time by `perf_counter` at which a step that goes on is suspended again
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._thread = Thread(target=self._run, args=(make, made), name="engine", daemon=True)
        self._thread.start()
        self._stepper = made.result()
        self.info = self._stepper.info

    async def compile_grammar(self, grammar: str) -> object:
        """Compile a grammar on a thread of its own, while steps run. Raises `GrammarError` if it does not compile."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._grammar_thread, self._stepper.compile_grammar, grammar)

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to the thread.

        Raises `RuntimeError` if the maximum number of steps is in flight, and `EngineDead` if the engine has stopped.
        """
        if self._death is not None or self._is_closed:
            raise EngineDead("the engine has stopped") from self._death
        if len(self._pending) > (self.info.steps_ahead if plan.ahead else 0):
            raise RuntimeError("a step is in flight already: collect it first")
        self._pending.append(_Submitted(plan, _Reply()))
        self._inbox.put(self._pending[-1])

    async def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return its result.

        If this call is cancelled, the next call returns the result. Raises `PlanError` if the engine refused the plan,
        `EngineDead` if the engine has stopped, and `RuntimeError` if no step is in flight.
        """
        if self._death is not None:
            raise EngineDead("the engine has stopped") from self._death
        if not self._pending:
            raise RuntimeError("no step is in flight: submit one first")
        result = await self._pending[0].reply.wait()
        self._pending.popleft()
        if isinstance(result, PlanError):
            raise result
        if isinstance(result, BaseException):
            self._death = result
            raise EngineDead(f"a step failed: {type(result).__name__}: {result}") from result
        return result

    def check_alive(self) -> None:
        """Raise `EngineDead` if a step has failed, or if what computes the steps has ended by itself."""
        if self._death is None:
            try:
                self._stepper.check_alive()
            except Exception as error:
                self._death = error
        if self._death is not None:
            raise EngineDead(f"the engine has stopped: {self._death}") from self._death

    def suspend(self) -> None:
        """Suspend the step in flight at its next layer boundary, if the engine can and no other step is suspended."""
        if self._pending and self.info.suspends_steps:
            self._to_suspend = self._pending[0].reply

    def close(self) -> None:
        """Finish the steps in flight, then end the thread. Blocks until the thread has ended; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(_Signal.CLOSE)
            self._grammar_thread.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    # -- on the engine's thread ----------------------------------------------------------------------------------

    def _run(self, make: Callable[[], Stepper], made: "Future[Stepper]") -> None:
        try:
            stepper = make()
        except BaseException as error:  # `__init__` waits for the error and raises it
            made.set_exception(error)
            return
        made.set_result(stepper)
        self._stepper = stepper
        try:
            self._serve()
        except BaseException as error:  # the top of this thread: `collect` raises it on the event loop
            for reply in self._launched:
                reply.send(error)
        stepper.close()

    def _serve(self) -> None:
        """Launch each plan when it arrives, and finalize the launched steps, until `close`.

        The oldest step is finalized when it has finished, or as soon as more than `info.steps_ahead` steps are in
        flight, because no further step may be launched then. After an error, `_launched` holds the replies of the steps
        that have no result.
        """
        self._stepper.call_when_finished(self._note_end)
        self._stepper.suspend_by(self)
        while (message := self._inbox.get()) is not _Signal.CLOSE:
            if isinstance(message, _Submitted):
                self._launch(message)
            self._finalize_finished()
        while self._launched:
            self._finalize()

    def _launch(self, message: "_Submitted") -> None:
        self._launched.append(message.reply)
        try:
            self._stepper.launch(message.plan)
        except PlanError as error:
            self._launched.pop().send(error)
        else:
            is_late = message.plan.ahead and (len(self._launched) == 1 or self._stepper.is_finished)
            message.reply.late_s = perf_counter() - self._ended_s if is_late else 0.0
            message.reply.num_ends = self._num_ends

    def _finalize_finished(self) -> None:
        while self._launched and (len(self._launched) > self.info.steps_ahead or self._stepper.is_finished):
            self._finalize()

    # The thread is its stepper's `Suspender`.

    def is_due(self) -> bool:
        return self._launched[0] is self._to_suspend or perf_counter() >= self._suspends_at_s

    def wait(self, suspended: StepResult) -> None:
        """Reply that the step is suspended; launch other plans until one says that the step goes on or is dropped.

        The reply to that plan is the reply of the step from then on.
        """
        self._launched.popleft().send(suspended)
        while isinstance(message := self._inbox.get(), _Submitted) and not message.plan.is_of_suspended:
            try:
                self._launch(message)
                self._finalize_finished()
            except Exception as error:  # it passes through the suspended step, which must not take it for its own
                raise EngineDead(f"{type(error).__name__}: {error}") from error
        if not isinstance(message, _Submitted):
            self._inbox.put(message)  # close
            raise StepDropped
        self._launched.append(message.reply)
        if message.plan.drop:
            raise StepDropped
        self._suspends_at_s = perf_counter() + message.plan.proceed_s

    def _note_end(self) -> None:
        """Note that a step has ended. Called on the thread that waited for it."""
        self._ended_s = perf_counter()
        self._num_ends += 1
        self._inbox.put(_Signal.STEP_FINISHED)

    def _finalize(self) -> None:
        result, reply = self._stepper.finalize(), self._launched[0]
        is_computed_at_launch = reply.num_ends == self._num_ends  # nobody waited for its end
        reply.send(replace(result, late_s=0.0 if is_computed_at_launch else reply.late_s))
        self._launched.popleft()
        self._suspends_at_s = inf


class _Reply:
    """A result that the engine's thread sends to the event loop."""

    __slots__ = ("_loop", "_result", "_waiter", "late_s", "num_ends")

    def __init__(self) -> None:
        self.late_s = 0.0  # of the step, as in its result
        self.num_ends = 0  # launched steps that were seen to have ended when this one was launched
        self._loop = asyncio.get_running_loop()
        self._result: StepResult | BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> StepResult | BaseException:
        """Return the result when it is there. If this call is cancelled, the next one returns it."""
        while self._result is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._result

    def send(self, result: StepResult | BaseException) -> None:
        with suppress(RuntimeError):  # the event loop is closed already
            self._loop.call_soon_threadsafe(self._resolve, result)

    def _resolve(self, result: StepResult | BaseException) -> None:
        if self._result is None:
            self._result = result
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A submitted plan, and the reply that will get its result."""

    plan: StepPlan
    reply: _Reply


class _Signal(Enum):
    CLOSE = auto()
    STEP_FINISHED = auto()  # a launched step may have finished
