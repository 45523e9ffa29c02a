"""The only driver: claim → accept → plan → engine → apply → publish, on whatever clock, queue and engine it is given.

The simulator runs this very loop. It decides nothing: `SchedulerCore` plans, the engine computes, Lua moves queue
entries. Four small tasks share the core on one thread: the step loop here; the intake, which claims (also while a step
runs); the outbox, which sends events and then acknowledgements; and upkeep (leases, heartbeat, the controller's outer
loop).
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from engine.interface import Engine, StepPlan, StepResult
from engine.step_time.model import StepWork
from scheduler.clock import Clock
from scheduler.control.feedback import UPDATE_S
from scheduler.events.base import EventChannel
from scheduler.planning.core import SchedulerCore
from scheduler.planning.step_report import StepReport
from scheduler.queue.base import Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.request import Lease
from scheduler.worker.claimer import Claimer
from scheduler.worker.heartbeat import Heartbeat, WorkerIdentity
from scheduler.worker.maintenance import Maintenance
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.publisher import Publisher
from scheduler.worker.step_log import NoStepLog, StepEntry, StepLog

PLANNING_S = 0.003  # a plan made ahead is made this long before the running step is expected to end


class SchedulerLoop:
    def __init__(
        self,
        core: SchedulerCore,
        engine: Engine,
        queue: Queue,
        events: EventChannel,
        registry: WorkerRegistry,
        metrics: SchedulerMetrics,
        clock: Clock,
        identity: WorkerIdentity,
        step_log: StepLog | None = None,
    ) -> None:
        self._core = core
        self._engine = engine
        self._queue = queue
        self._metrics = metrics
        self._clock = clock
        self._step_log = step_log or NoStepLog()
        self._worker_id = identity.worker_id
        self._heartbeat = Heartbeat(registry, metrics, core, engine.info, identity)
        self._changed = asyncio.Event()  # something for the step loop to look at
        self._publisher = Publisher(queue, events, self._drop)
        self._maintenance = Maintenance(
            core, queue, events, metrics, self._heartbeat, clock, drop=self._drop, notify=self._changed.set
        )
        self._claimer = Claimer(core, engine, queue, self._heartbeat, clock, self._refuse, self._drop)
        self._draining = False
        self._stopped = False

    async def run(self) -> None:
        """Serve until `drain` (or `stop`) has been called and what is held has ended. Any error ends all tasks
        and is raised; a new loop may then go on with the same engine and core."""
        try:
            await self._start_empty()
            await self._heartbeat.beat(self._clock.now(), self._clock.wall_ms())
            await self._run_tasks()
            await self._give_back()
            await self._heartbeat.withdraw()
        finally:
            await self._queue.close()

    async def _run_tasks(self) -> None:
        outbox = asyncio.create_task(self._publisher.run())
        background = [
            asyncio.create_task(self._claimer.run()),
            asyncio.create_task(self._maintenance.run()),
        ]
        steps = asyncio.create_task(self._step_loop())
        try:
            await _first_error_or(steps, [outbox, *background])
            self._publisher.close()
            await outbox
        finally:
            for task in (steps, outbox, *background):
                task.cancel()
            await asyncio.gather(steps, outbox, *background, return_exceptions=True)

    async def _start_empty(self) -> None:
        """Nothing is under lease, and nothing of a loop before this one is left in the core. That one may have ended
        by an error beside a step in flight, whose result says what the engine has free."""
        leases = self._core.release_all()
        while self._core.is_step_in_flight:
            self._core.apply(await self._engine.collect(), self._clock.now())
        await self._give_back(leases)

    async def _give_back(self, leases: Sequence[Lease] = ()) -> None:
        """Return everything under lease to its place in the queue."""
        await self._queue.release([*leases, *self._core.release_all()])
        await self._queue.requeue_worker(self._worker_id)  # what a claim cut short, or a dead process, has taken

    def drain(self) -> None:
        """Claim nothing more; `run` returns when what is held has ended."""
        self._draining = True
        self._claimer.close()
        self._changed.set()

    def stop(self) -> None:
        """`run` returns after the step in flight; the rest goes back to the queue."""
        self._stopped = True
        self.drain()

    # -- the step loop -----------------------------------------------------------------------------------------

    async def _step_loop(self) -> None:
        while not (self._stopped or (self._draining and self._core.num_held == 0)):
            self._changed.clear()
            plan = self._core.plan(self._clock.now())
            if plan.is_empty:
                await self._idle()
                continue
            await self._run(plan)

    async def _run(self, plan: StepPlan) -> None:
        """This step, and those that could be planned while the one before them ran."""
        begun_s = self._clock.now()
        self._engine.submit(plan)
        if not self._engine.info.steps_ahead:
            self._take_result(await self._engine.collect(), begun_s)
            return
        following: StepPlan | None = plan
        while following is not None:
            collecting = asyncio.create_task(self._engine.collect())
            try:
                following = await self._submit_next(collecting)
                self._take_result(await collecting, begun_s)
            finally:
                collecting.cancel()  # where this was: the engine still has the result
            begun_s = self._clock.now()

    async def _submit_next(self, collecting: asyncio.Task[StepResult]) -> StepPlan | None:
        """Towards the end of the step that runs: the longer it is put off, the more of what arrives is in the plan."""
        wait_s = self._core.running_step_s - PLANNING_S
        if wait_s > 0:
            await asyncio.wait({collecting}, timeout=wait_s)
        following = None if self._stopped else self._core.plan_async(self._clock.now())
        if following is not None:
            self._engine.submit(following)
        return following

    async def _idle(self) -> None:
        """Nothing can run: sleep until something changes, or until somebody has waited for company long enough."""
        self._claimer.note_room()
        left_s = self._core.idle_until_s - self._clock.now()
        with suppress(TimeoutError):  # upkeep has it look again every half second, in any case
            async with asyncio.timeout(max(0.0, left_s) if left_s < UPDATE_S else None):
                await self._changed.wait()

    def _take_result(self, result: StepResult, begun_s: float) -> None:
        now = self._clock.now()
        report = self._core.apply(result, now, overhead_s=max(0.0, now - begun_s - result.elapsed_s))
        if report.sequences:
            self._metrics.record_step(result.elapsed_s, report.sequences)
            self._log_step(result, report, now)
        self._send(report)
        self._claimer.note_room()

    def _log_step(self, result: StepResult, report: StepReport, now: float) -> None:
        if report.work is not None or result.evicted:
            work, num_evicted = report.work or StepWork(), len(result.evicted)
            predicted_s, sequences = report.predicted_s, report.sequences
            self._step_log.record(StepEntry.of(work, result.elapsed_s, now, predicted_s, num_evicted, sequences))

    def _send(self, report: StepReport) -> None:
        for end in report.ended:
            self._heartbeat.count_ended(end)
        self._publisher.send(report)
        self._metrics.record_report(report)

    # -- what leaves before its end ------------------------------------------------------------------------------

    def _refuse(self) -> None:
        """What was claimed and can never run."""
        self._send(self._core.refuse(self._clock.now()))
        self._changed.set()

    def _drop(self, request_ids: Sequence[str]) -> None:
        dropped = self._core.cancel(request_ids)
        for state in dropped:
            self._metrics.record_cancelled(state.tier.name)
        if dropped:
            self._changed.set()


async def _first_error_or(main: asyncio.Task[None], others: Sequence[asyncio.Task[None]]) -> None:
    """Wait for `main`; if another task ends first, its error ends the wait."""
    while not main.done():
        done, _ = await asyncio.wait({main, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        others = [t for t in others if not t.done()]
    main.result()
