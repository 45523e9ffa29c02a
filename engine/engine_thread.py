"""Runs an engine's blocking steps on a thread of their own, so that the event loop never waits for a device.

Knows threads and futures; not what a step is. Steps run one at a time in the order of submission.
"""

import asyncio
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from engine.interface import EngineDead, EngineInfo, PlanError, StepPlan, StepResult


class Stepper(Protocol):
    """An engine that blocks while it steps."""

    @property
    def info(self) -> EngineInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


class EngineThread:
    """The `Engine` protocol over a `Stepper`. `submit` and `collect` belong to one event loop.

    A `PlanError` is raised by `collect` and the engine goes on; anything else that a step raises ends the
    thread, and `collect` and all later calls raise `EngineDead`.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._plans: SimpleQueue[tuple[StepPlan, _Reply] | None] = SimpleQueue()
        self._pending: _Reply | None = None
        self._death: BaseException | None = None
        self._is_closed = False
        self._thread = Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._stepper.info

    def submit(self, plan: StepPlan) -> None:
        if self._death is not None or self._is_closed:
            raise EngineDead("the engine does not run any more") from self._death
        if self._pending is not None:
            raise RuntimeError("a step is in flight already: collect it first")
        self._pending = _Reply()
        self._plans.put((plan, self._pending))

    async def collect(self) -> StepResult:
        """Cancelling it loses nothing: the next call returns the same step."""
        if self._death is not None:
            raise EngineDead("the engine does not run any more") from self._death
        if self._pending is None:
            raise RuntimeError("no step is in flight: submit one first")
        result = await asyncio.shield(self._pending.future)
        self._pending = None
        if isinstance(result, PlanError):
            raise result
        if isinstance(result, BaseException):
            self._death = result
            raise EngineDead(f"a step failed: {type(result).__name__}: {result}") from result
        return result

    def close(self) -> None:
        """Finish the step in flight, then end the thread. Blocks; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._plans.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (order := self._plans.get()) is not None:
            plan, reply = order
            try:
                result: StepResult | BaseException = self._stepper.step(plan)
            except BaseException as error:  # the top of this thread: whatever it is, the event loop must hear of it
                result = error
            reply.send(result)
            if isinstance(result, BaseException) and not isinstance(result, PlanError):
                break
        self._stepper.close()


class _Reply:
    """A future that another thread resolves."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[StepResult | BaseException] = self._loop.create_future()

    def send(self, result: StepResult | BaseException) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._resolve, result)

    def _resolve(self, result: StepResult | BaseException) -> None:
        if not self.future.done():
            self.future.set_result(result)
