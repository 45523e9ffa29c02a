"""Runs steps while there is work: plan a step, execute it on the engine, apply the result, report it.

Makes no decisions: `StepCore` plans, and the engine computes.
"""

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from engine.interface import Engine, StepPlan, StepResult
from scheduler.control.windows import UPDATE_S
from scheduler.drivers.steps.core import StepCore
from scheduler.drivers.steps.grammar_compiler import GrammarCompiler
from scheduler.drivers.steps.isolation import Isolation
from scheduler.drivers.steps.step_log import StepEntry, StepLog
from scheduler.holdings.report import Report
from scheduler.queue.base import Queue
from scheduler.request import Lease
from scheduler.store.outage import StoreOutage
from scheduler.worker.driver import RequestWorker

# A step counts as stuck when it takes longer than `STUCK_S` seconds and longer than `STUCK_FACTOR` times its
# prediction. The worker then sends no heartbeats. They go on when the step ends after all.
STUCK_S = 2.0
STUCK_FACTOR = 10.0  # far beyond the errors of predictions (`tidegate_step_time_error_ratio`)
# With async scheduling, the next step is planned some time before the step in flight should end: the lead. A step that
# is launched late makes the lead longer by a share of the delay, and each other one makes it a little shorter. So the
# device hardly waits, whatever planning, launching, threads and timers take on a machine.
LATE_GAIN = 0.5
LEAD_DECAY = 0.003
LEAST_LEAD_S = 0.0005  # seconds


class StepDriver:
    """Implements `scheduler.worker.driver.Driver`."""

    def __init__(self, core: StepCore, engine: Engine, step_log: StepLog | None = None) -> None:
        self.core = core
        self.info = engine.info
        self.unsupported: Collection[str] = ()
        self._engine = engine
        self._step_log = step_log
        self._begun_s: float | None = None  # begin of the step in flight; None: none is in flight
        self._lead_s = 0.002  # the lead in seconds

    @property
    def is_stuck(self) -> bool:
        """Whether the step in flight takes so much longer than predicted that it may never end."""
        if self._begun_s is None:
            return False
        return self._clock.now() - self._begun_s > max(STUCK_S, STUCK_FACTOR * self.core.running.step_s)

    def attach(self, worker: RequestWorker) -> None:
        self._worker = worker
        self._clock = worker.clock
        self._marks = StepMarks(self.core.isolation, worker.queue, worker.outage)
        self._grammars = GrammarCompiler(self.core, self._engine, worker.intake, self._marks.write)

    def beside(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._grammars.run()]

    def note_arrived(self, request_ids: Sequence[str], now: float) -> None:
        """Suspend the step in flight if a request then starts so much sooner that it pays."""
        self._grammars.wake()
        if self.core.planner.suspends_for(request_ids, now):
            self._engine.suspend()

    async def clear(self) -> list[Lease]:
        """Release all requests that an earlier loop has left in the core, and return their leases.

        If that loop ended with an error while a step was in flight, apply the result of this step: it says which blocks
        of the engine are free.
        """
        leases = self.core.held.release_all()
        while self.core.is_busy:
            self._begun_s = self._clock.now()
            self.core.apply(await self._engine.collect(), self._clock.now())
            if self.core.running.suspended is not None:
                self._engine.submit(self.core.planner.drop_suspended(self._clock.now()))
        self._begun_s = None
        return leases

    async def run(self) -> None:
        while not self._worker.is_over:
            self._worker.intake.changed.clear()
            now = self._clock.now()
            self._worker.send(self.core.held.refuse(now))
            plan = self.core.plan(now)
            if plan.is_empty:
                self._engine.check_alive()
                await self._idle()
            else:
                await self._run_steps(plan)
                self._begun_s = None

    async def _run_steps(self, plan: StepPlan) -> None:
        """Run `plan`, and all steps that can be planned while the step before them runs (async scheduling)."""
        try:
            await self._marks.write()
        finally:  # also if the store does not answer: the core awaits the result of its plan
            begun_s = self._begun_s = self._clock.now()
            self._engine.submit(plan)
        if not self._engine.info.steps_ahead:
            self._apply(await self._engine.collect(), begun_s)
            return
        has_next = True
        while has_next:
            collecting = asyncio.create_task(self._engine.collect())
            try:
                has_next = await self._submit_next(collecting)
                self._apply(await collecting, begun_s)
            finally:
                collecting.cancel()  # has an effect only after an error; the engine then keeps the result
            begun_s = self._begun_s = self._clock.now()

    async def _submit_next(self, collecting: "asyncio.Task[StepResult]") -> bool:
        """Plan and submit the next step shortly before the step in flight ends.

        Planning late lets the plan include more arrivals. Return False if no step was submitted, because the plan must
        wait for the result of the step in flight.
        """
        expected_s = self.core.running.expected_s
        self._lead_s = max(LEAST_LEAD_S, min(self._lead_s, expected_s))  # more than the whole step is of no use
        wait_s = expected_s - self._lead_s
        if wait_s > 0:
            await asyncio.wait({collecting}, timeout=wait_s)
        if self._worker.is_stopped:
            return False
        now = self._clock.now()
        self._worker.send(self.core.held.refuse(now))
        plan = self.core.planner.plan_ahead(now + self._lead_s)
        if plan is None:
            return False
        self._engine.submit(plan)
        return True

    def _apply(self, result: StepResult, begun_s: float) -> None:
        now = self._clock.now()
        overhead_s = max(0.0, now - begun_s - result.elapsed_s)
        self._lead_s += LATE_GAIN * result.late_s or -LEAD_DECAY * self._lead_s
        report = self.core.apply(result, now, overhead_s)
        if report.sequences:
            self._worker.metrics.record_step(report.elapsed_s, report.sequences)
            self._log(report, now)
        self._worker.send(report)
        self._worker.claimer.note_room()
        if self.core.isolation.has_suspects:
            self._grammars.wake()  # a grammar that had to wait may be compiled now

    def _log(self, report: Report, now: float) -> None:
        """Write a log entry if the step's time says something about its work."""
        if self._step_log is not None and report.work is not None:
            entry = StepEntry.of(report.work, report.elapsed_s, now, report.predicted_s, report.sequences)
            self._step_log.record(entry)

    async def _idle(self) -> None:
        """Sleep until something changes or a batching delay ends. Maintenance also wakes the loop every `UPDATE_S`."""
        self._worker.claimer.note_room()
        left_s = self.core.planner.idle_until_s - self._clock.now()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, left_s) if left_s < UPDATE_S else None):
                await self._worker.intake.changed.wait()


class StepMarks:
    """Tells the store which suspects are in the worker's steps, so that only they are blamed if the worker dies.

    A worker that dies cannot say anything any more, so the store must know it before each step. Only what has changed
    is written, and nothing at all while no request is suspect.
    """

    def __init__(self, isolation: Isolation, queue: Queue, outage: StoreOutage) -> None:
        self._isolation = isolation
        self._queue = queue
        self._outage = outage
        self._waits: dict[Lease, bool] = {}  # what the store knows; a request without a mark counts as in a step
        self._alone: Lease | None = None
        self._lock = asyncio.Lock()  # the driver and the compiler of grammars write

    async def write(self) -> None:
        """Bring the marks in the store up to date. Call it before each step."""
        if not (self._isolation.has_suspects or self._waits or self._alone):
            return
        async with self._lock:
            waits, alone = self._isolation.marks()
            changed = {lease: waiting for lease, waiting in waits.items() if self._waits.get(lease, False) != waiting}
            is_known = not changed and alone == self._alone
            if is_known or await self._outage.attempt(self._queue.note_step(changed, alone)):
                self._waits, self._alone = waits, alone
