"""Runs an engine's blocking steps on a thread of their own, so that the event loop never waits for a device.

Knows threads and futures; not what a step is. Steps run one at a time in the order of submission.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol, cast

from engine.interface import EngineDead, EngineInfo, PlanError, StepEviction, StepPlan, StepResult

_LOOK_S = 0.0001  # between two looks at a step that runs, while no plan comes


class Stepper(Protocol):
    """An engine that blocks while it steps."""

    @property
    def info(self) -> EngineInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...

    def evict(self, step_id: int, seq_ids: Collection[str]) -> None:
        """Evict these sequences from the step, as far as `info.step_eviction` says. Another thread may be in `step`
        at the time, or not yet, or no longer."""
        ...

    def close(self) -> None: ...


class Launcher(Stepper, Protocol):
    """One whose device goes on while the host does other things: what a stepper with `info.steps_ahead` is."""

    @property
    def is_settled(self) -> bool:
        """`settle` would not wait."""
        ...

    def launch(self, plan: StepPlan) -> None: ...

    def settle(self) -> StepResult: ...


class EngineThread:
    """The `Engine` protocol over a `Stepper`. `submit` and `collect` belong to one event loop.

    A `PlanError` is raised by `collect` and the engine goes on; anything else that a step raises ends the
    thread, and `collect` and all later calls raise `EngineDead`.
    """

    def __init__(self, make: Callable[[], Stepper]) -> None:
        """The stepper is made on the thread, too: OpenMP gives each thread that computes a pool of its own, and with
        more pooled threads than cores it wakes them up for every operator. Raises what `make` raises."""
        made: Future[Stepper] = Future()
        self._plans: SimpleQueue[_Order | _Signal] = SimpleQueue()
        self._pending: deque[_Order] = deque()
        self._death: BaseException | None = None
        self._is_closed = False
        self._thread = Thread(target=self._make_and_serve, args=(make, made), name="engine", daemon=True)
        self._thread.start()
        self._stepper = made.result()

    @property
    def info(self) -> EngineInfo:
        return self._stepper.info

    def submit(self, plan: StepPlan) -> None:
        if self._death is not None or self._is_closed:
            raise EngineDead("the engine does not run any more") from self._death
        if len(self._pending) > (self.info.steps_ahead if plan.ahead else 0):
            raise RuntimeError("a step is in flight already: collect it first")
        self._pending.append(_Order(plan, _Reply()))
        self._plans.put(self._pending[-1])

    async def collect(self) -> StepResult:
        """Cancelling it loses nothing: the next call returns the same step."""
        if self._death is not None:
            raise EngineDead("the engine does not run any more") from self._death
        if not self._pending:
            raise RuntimeError("no step is in flight: submit one first")
        result = await asyncio.shield(self._pending[0].reply.future)
        self._pending.popleft()
        if isinstance(result, PlanError):
            raise result
        if isinstance(result, BaseException):
            self._death = result
            raise EngineDead(f"a step failed: {type(result).__name__}: {result}") from result
        return result

    def evict(self, seq_ids: Collection[str]) -> None:
        if self._pending and self.info.step_eviction is not StepEviction.NOTHING:
            self._stepper.evict(self._pending[0].plan.step_id, seq_ids)

    def close(self) -> None:
        """Finish the step in flight, then end the thread. Blocks; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._plans.put(_Signal.CLOSE)
        self._thread.join()

    def _make_and_serve(self, make: Callable[[], Stepper], made: "Future[Stepper]") -> None:
        try:
            stepper = make()
        except BaseException as error:  # whoever waits for it must hear of it
            made.set_exception(error)
            return
        made.set_result(stepper)
        if stepper.info.steps_ahead:
            self._serve_launches(cast(Launcher, stepper))
        else:
            self._serve_steps(stepper)
        stepper.close()

    def _serve_steps(self, stepper: Stepper) -> None:
        while isinstance(order := self._plans.get(), _Order):
            if not _answer(order.reply, partial(stepper.step, order.plan)):
                return

    def _serve_launches(self, launcher: Launcher) -> None:
        launched: deque[_Reply] = deque()
        self._fly(launcher, launched)
        for reply in launched:  # the engine is at its end, and so are they
            reply.send(EngineDead("a step beside it failed"))

    def _fly(self, launcher: Launcher, launched: "deque[_Reply]") -> None:
        """A plan that comes while a step runs is launched behind it at once."""
        while (order := self._wait(launcher) if launched else self._plans.get()) is not _Signal.CLOSE:
            if isinstance(order, _Order) and not _launch(launcher, order, launched):
                return
            is_full = len(launched) > launcher.info.steps_ahead
            if (is_full or order is _Signal.SETTLED) and not _answer(launched.popleft(), launcher.settle):
                return
        while launched and _answer(launched.popleft(), launcher.settle):
            pass

    def _wait(self, launcher: Launcher) -> "_Order | _Signal":
        """The next order, or that the oldest step is there."""
        while True:
            try:
                return self._plans.get(timeout=_LOOK_S)
            except Empty:
                if launcher.is_settled:
                    return _Signal.SETTLED


def _launch(launcher: Launcher, order: "_Order", launched: "deque[_Reply]") -> bool:
    """False: the engine is at its end."""
    try:
        launcher.launch(order.plan)
    except PlanError as error:
        order.reply.send(error)
    except BaseException as error:  # as in `_answer`
        order.reply.send(error)
        return False
    else:
        launched.append(order.reply)
    return True


def _answer(reply: "_Reply", compute: Callable[[], StepResult]) -> bool:
    """Send what `compute` gives or raises. False: the engine is at its end."""
    try:
        reply.send(compute())
    except PlanError as error:
        reply.send(error)
    except BaseException as error:  # the top of this thread: whatever it is, the event loop must hear of it
        reply.send(error)
        return False
    return True


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


@dataclass(frozen=True, slots=True)
class _Order:
    plan: StepPlan
    reply: _Reply


class _Signal(Enum):
    CLOSE = auto()
    SETTLED = auto()  # the oldest step that was launched
