"""Runs an engine's blocking steps on a thread of their own, so that the event loop never waits for a device.

Knows threads and futures; not what a step computes. Steps run one at a time in the order of submission. With async
scheduling (`EngineInfo.steps_ahead`), the next step is launched while the one before it still runs.
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

_POLL_S = 0.0001  # seconds between two checks whether the running step has finished, while no plan comes


class Stepper(Protocol):
    """An engine whose `step` blocks until the device is done."""

    @property
    def info(self) -> EngineInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...

    def evict(self, step_id: int, seq_ids: Collection[str]) -> None:
        """Evict these sequences from step `step_id`, as far as `info.step_eviction` allows. May be called by another
        thread than `step`: before that step, during it, or after it (then without effect)."""
        ...

    def close(self) -> None: ...


class Launcher(Stepper, Protocol):
    """A stepper for async scheduling (`info.steps_ahead` ≥ 1): `launch` starts a step and returns while the device
    computes it, `finalize` waits for the oldest launched step and returns its result."""

    @property
    def is_finished(self) -> bool:
        """True if `finalize` would not wait."""
        ...

    def launch(self, plan: StepPlan) -> None: ...

    def finalize(self) -> StepResult: ...


class EngineThread:
    """The `Engine` protocol over a `Stepper`. Call `submit` and `collect` from one event loop.

    `collect` raises a step's `PlanError`, and the engine goes on. Any other error of a step ends the thread: `collect`
    and all later calls raise `EngineDead`.
    """

    def __init__(self, make: Callable[[], Stepper]) -> None:
        """Call `make` on the engine's thread and wait for it. Raises what `make` raises.

        The stepper is made on the thread that runs it: OpenMP gives each computing thread a pool of its own, and with
        more pooled threads than cores every operator has to wake them up.
        """
        made: Future[Stepper] = Future()
        self._inbox: SimpleQueue[_Submitted | _Signal] = SimpleQueue()
        self._pending: deque[_Submitted] = deque()
        self._death: BaseException | None = None
        self._is_closed = False
        self._thread = Thread(target=self._run, args=(make, made), name="engine", daemon=True)
        self._thread.start()
        self._stepper = made.result()

    @property
    def info(self) -> EngineInfo:
        return self._stepper.info

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to the thread. Raises `RuntimeError` while as many steps as allowed are in flight."""
        if self._death is not None or self._is_closed:
            raise EngineDead("the engine has stopped") from self._death
        if len(self._pending) > (self.info.steps_ahead if plan.ahead else 0):
            raise RuntimeError("a step is in flight already: collect it first")
        self._pending.append(_Submitted(plan, _Reply()))
        self._inbox.put(self._pending[-1])

    async def collect(self) -> StepResult:
        """Return the result of the oldest step in flight. After a cancelled call, the next one returns it."""
        if self._death is not None:
            raise EngineDead("the engine has stopped") from self._death
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
        """Evict these sequences from the oldest step in flight, as far as `info.step_eviction` allows."""
        if self._pending and self.info.step_eviction is not StepEviction.NOTHING:
            self._stepper.evict(self._pending[0].plan.step_id, seq_ids)

    def close(self) -> None:
        """Finish the steps in flight, then end the thread. Blocks; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(_Signal.CLOSE)
        self._thread.join()

    # -- on the engine's thread ----------------------------------------------------------------------------------

    def _run(self, make: Callable[[], Stepper], made: "Future[Stepper]") -> None:
        try:
            stepper = make()
        except BaseException as error:  # `__init__` waits for it and raises it
            made.set_exception(error)
            return
        made.set_result(stepper)
        if stepper.info.steps_ahead:
            self._run_async(cast(Launcher, stepper))
        else:
            self._run_blocking(stepper)
        stepper.close()

    def _run_blocking(self, stepper: Stepper) -> None:
        while isinstance(message := self._inbox.get(), _Submitted):
            if not _send_result(message.reply, partial(stepper.step, message.plan)):
                return

    def _run_async(self, launcher: Launcher) -> None:
        launched: deque[_Reply] = deque()
        self._launch_and_finalize(launcher, launched)
        for reply in launched:  # not empty after an error only
            reply.send(EngineDead("another step failed"))

    def _launch_and_finalize(self, launcher: Launcher, launched: "deque[_Reply]") -> None:
        """Launch each plan when it comes; finalize the oldest step when it has finished, or when no further one may be
        launched before. Return after `close` or an error; `launched` then holds the steps without a result."""
        while (message := self._wait(launcher) if launched else self._inbox.get()) is not _Signal.CLOSE:
            if isinstance(message, _Submitted) and not _launch(launcher, message, launched):
                return
            must_finalize = message is _Signal.STEP_FINISHED or len(launched) > launcher.info.steps_ahead
            if must_finalize and not _send_result(launched.popleft(), launcher.finalize):
                return
        while launched and _send_result(launched.popleft(), launcher.finalize):
            pass

    def _wait(self, launcher: Launcher) -> "_Submitted | _Signal":
        """Return the next message, or STEP_FINISHED if the oldest launched step has finished before one came."""
        while True:
            try:
                return self._inbox.get(timeout=_POLL_S)
            except Empty:
                if launcher.is_finished:
                    return _Signal.STEP_FINISHED


def _launch(launcher: Launcher, submitted: "_Submitted", launched: "deque[_Reply]") -> bool:
    """Launch a plan, and note its reply in `launched`. Return False if an error has ended the engine."""
    try:
        launcher.launch(submitted.plan)
    except PlanError as error:
        submitted.reply.send(error)
    except BaseException as error:  # as in `_send_result`
        submitted.reply.send(error)
        return False
    else:
        launched.append(submitted.reply)
    return True


def _send_result(reply: "_Reply", compute: Callable[[], StepResult]) -> bool:
    """Send what `compute` returns or raises. Return False if an error has ended the engine."""
    try:
        reply.send(compute())
    except PlanError as error:
        reply.send(error)
    except BaseException as error:  # the top of this thread: `collect` raises it on the event loop
        reply.send(error)
        return False
    return True


class _Reply:
    """A future of the event loop, resolved by the engine's thread."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[StepResult | BaseException] = self._loop.create_future()

    def send(self, result: StepResult | BaseException) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._resolve, result)

    def _resolve(self, result: StepResult | BaseException) -> None:
        if not self.future.done():
            self.future.set_result(result)


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A plan, and where its result goes."""

    plan: StepPlan
    reply: _Reply


class _Signal(Enum):
    CLOSE = auto()
    STEP_FINISHED = auto()  # the oldest launched step
