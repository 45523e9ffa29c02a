"""Runs steps while there is work: plan a step, execute it on the engine, apply the result, report it.

Makes no decisions: `SchedulerCore` plans, and the engine computes.
"""

import asyncio
from contextlib import suppress

from engine.interface import Engine, StepPlan, StepResult
from engine.step_time.cost import StepWork
from scheduler.clock import Clock
from scheduler.control.feedback import UPDATE_S
from scheduler.drivers.steps.core import SchedulerCore
from scheduler.drivers.steps.step_log import StepEntry, StepLog
from scheduler.drivers.steps.step_marks import StepMarks
from scheduler.holdings.report import Report
from scheduler.request import Lease
from scheduler.worker.claimer import Claimer
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.reporter import Reporter
from scheduler.worker.request_intake import RequestIntake

# A step counts as stuck when it takes longer than `STUCK_S` seconds and longer than `STUCK_FACTOR` times its
# prediction. The worker then sends no heartbeats. They go on when the step ends after all.
STUCK_S = 2.0
STUCK_FACTOR = 10.0  # far beyond the errors of predictions (`tidegate_step_time_error_ratio`)
PLANNING_S = 0.003  # seconds; async scheduling plans the next step this long before the step in flight should end


class StepLoop:
    def __init__(
        self,
        core: SchedulerCore,
        engine: Engine,
        intake: RequestIntake,
        claimer: Claimer,
        reporter: Reporter,
        metrics: SchedulerMetrics,
        step_log: StepLog,
        marks: StepMarks,
        clock: Clock,
    ) -> None:
        self._core = core
        self._engine = engine
        self._intake = intake
        self._claimer = claimer
        self._reporter = reporter
        self._metrics = metrics
        self._step_log = step_log
        self._marks = marks
        self._clock = clock
        self._draining = False
        self._stopped = False
        self._begun_s: float | None = None  # begin of the step in flight; None: none is in flight

    @property
    def is_stuck(self) -> bool:
        """Whether the step in flight takes so much longer than predicted that it may never end."""
        if self._begun_s is None:
            return False
        return self._clock.now() - self._begun_s > max(STUCK_S, STUCK_FACTOR * self._core.running_step_s)

    def drain(self) -> None:
        """Make `run` return when the worker holds no more requests."""
        self._draining = True
        self._intake.changed.set()

    def stop(self) -> None:
        """Make `run` return after the step in flight."""
        self._stopped = True
        self._intake.changed.set()

    async def clear(self) -> list[Lease]:
        """Release all requests that an earlier loop has left in the core, and return their leases.

        If that loop ended with an error while a step was in flight, apply the result of this step: it says which blocks
        of the engine are free.
        """
        leases = self._core.release_all()
        while self._core.is_step_in_flight:
            self._begun_s = self._clock.now()
            self._core.apply(await self._engine.collect(), self._clock.now())
        self._begun_s = None
        return leases

    async def run(self) -> None:
        while not (self._stopped or (self._draining and self._core.num_held == 0)):
            self._intake.changed.clear()
            now = self._clock.now()
            self._reporter.send(self._core.refuse(now))
            plan = self._core.plan(now)
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

        Planning late lets the plan include more arrivals. Return False if no step was submitted, because something must
        be decided first.
        """
        wait_s = self._core.running_step_s - PLANNING_S
        if wait_s > 0:
            await asyncio.wait({collecting}, timeout=wait_s)
        plan = None if self._stopped else self._core.plan_async(self._clock.now())
        if plan is not None:
            self._engine.submit(plan)
        return plan is not None

    def _apply(self, result: StepResult, begun_s: float) -> None:
        now = self._clock.now()
        overhead_s = max(0.0, now - begun_s - result.elapsed_s)
        report = self._core.apply(result, now, overhead_s)
        if report.sequences:
            self._metrics.record_step(result.elapsed_s, report.sequences)
            self._log(result, report, now)
        self._reporter.send(report)
        self._claimer.note_room()
        if self._core.has_suspects:
            self._intake.grammar_arrived.set()  # a grammar that had to wait may be compiled now

    def _log(self, result: StepResult, report: Report, now: float) -> None:
        """Write a log entry if the step's time says something about its work, or if sequences were evicted from it."""
        if report.work is not None or result.evicted:
            work, num_evicted = report.work or StepWork(), len(result.evicted)
            predicted_s, sequences = report.predicted_s, report.sequences
            self._step_log.record(StepEntry.of(work, result.elapsed_s, now, predicted_s, num_evicted, sequences))

    async def _idle(self) -> None:
        """Sleep until something changes or a batching delay ends. Maintenance also wakes the loop every `UPDATE_S`."""
        self._claimer.note_room()
        left_s = self._core.idle_until_s - self._clock.now()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, left_s) if left_s < UPDATE_S else None):
                await self._intake.changed.wait()
