"""The only driver: claim → accept → plan → engine → apply → publish, on whatever clock, queue and engine it is given.

The simulator runs this very loop. It decides nothing: `SchedulerCore` plans, the engine computes, Lua moves queue
entries. Four small tasks share the core on one thread: the step loop; intake (claims as soon as something is put, also
while a step runs, so that an arrival is in the very next step); the outbox (events, then acknowledgements, in order);
and upkeep (leases, heartbeat, the controller's outer loop).
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

import structlog

from engine.interface import Engine, StepPlan, StepResult
from scheduler.clock import Clock
from scheduler.core import SchedulerCore
from scheduler.events.base import EventChannel
from scheduler.heartbeat import Heartbeat, WorkerIdentity
from scheduler.metrics import SchedulerMetrics
from scheduler.outbox import Outbox
from scheduler.queue.base import Lease, Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.report import StepReport
from scheduler.sla import UPDATE_S, Load

log = structlog.get_logger()

LEASE_S = 10.0
RENEW_EVERY = 6  # upkeep rounds
HEARTBEAT_EVERY = 2
PLANNING_S = 0.003  # a plan made ahead is made this long before the running step is expected to end
IDLE_S = 0.5  # the longest sleep of an idle loop: bounds a lost wake-up


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
    ) -> None:
        self._core = core
        self._engine = engine
        self._queue = queue
        self._events = events
        self._metrics = metrics
        self._clock = clock
        self._worker_id = identity.worker_id
        self._heartbeat = Heartbeat(registry, metrics, core, engine.info, identity)
        self._changed = asyncio.Event()  # something for the step loop to look at
        self._room = asyncio.Event()  # something for the intake to claim for
        self._outbox = Outbox(queue, events, self._drop)
        self._waiting: dict[str, int] = {}
        self._claimed: Counter[str] = Counter()  # since the last look at the depths
        self._known_empty = False  # the last claim found less than it asked for; nothing was put since
        self._draining = False
        self._stopped = False

    async def run(self) -> None:
        """Serve until `drain` (or `stop`) has been called and what is held has ended. Any error ends all tasks
        and is raised; a new loop may then go on with the same engine and core."""
        try:
            await self._start_empty()
            await self._heartbeat.beat(self._clock.now())
            await self._run_tasks()
            await self._give_back()
            await self._heartbeat.withdraw()
        finally:
            await self._queue.close()

    async def _run_tasks(self) -> None:
        outbox = asyncio.create_task(self._outbox.run())
        background = [
            asyncio.create_task(self._take_in()),
            asyncio.create_task(self._upkeep()),
        ]
        steps = asyncio.create_task(self._step_loop())
        try:
            await _first_error_or(steps, [outbox, *background])
            self._outbox.close()
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
        self._changed.set()

    def stop(self) -> None:
        """`run` returns after the step in flight; the rest goes back to the queue."""
        self._draining = self._stopped = True
        self._changed.set()

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
        self._engine.submit(plan)
        ran = self._count_tiers(plan)
        if not self._engine.info.steps_ahead:
            self._take_result(await self._engine.collect(), ran)
            return
        following: StepPlan | None = plan
        while following is not None:
            collecting = asyncio.create_task(self._engine.collect())
            try:
                following = await self._submit_next(following, collecting)
                following_ran = self._count_tiers(following) if following is not None else Counter[str]()
                self._take_result(await collecting, ran)
            finally:
                collecting.cancel()  # where this was: the engine still has the result
            ran = following_ran

    async def _submit_next(self, plan: StepPlan, collecting: asyncio.Task[StepResult]) -> StepPlan | None:
        """Towards the end of the step that runs: the longer it is put off, the more of what arrives is in the plan."""
        wait_s = self._core.predicted_s(plan) - PLANNING_S
        if wait_s > 0:
            await asyncio.wait({collecting}, timeout=wait_s)
        following = None if self._stopped else self._core.plan_ahead(self._clock.now())
        if following is not None:
            self._engine.submit(following)
        return following

    async def _idle(self) -> None:
        """Nothing can run: sleep until something changes."""
        self._room.set()
        await self._changed.wait()

    def _take_result(self, result: StepResult, ran: Counter[str]) -> None:
        now = self._clock.now()
        report = self._core.apply(result, now)
        if ran:
            self._metrics.record_step(result.elapsed_s, ran)
            self._core.controller.observe_step(result.elapsed_s, ran, self._wanting() | set(ran))
        self._send(report, now)
        self._room.set()

    def _wanting(self) -> set[str]:
        """Tiers with work, here or in the queue."""
        held = {tier.name for tier in self._core.tiers if self._core.num_held_of(tier.name)}
        return held | {tier for tier, depth in self._waiting.items() if depth}

    def _count_tiers(self, plan: StepPlan) -> Counter[str]:
        return Counter(self._core.tier_of(run.seq_id) for run in plan.run)

    def _send(self, report: StepReport, now: float) -> None:
        controller = self._core.controller
        for sample in report.samples:
            if sample.kind in ("ttft", "itl"):
                controller.observe_latency(sample.tier, sample.kind, sample.seconds, now)
        for end in report.ended:
            controller.observe_end(end.tier, end.met_slo, now)
            self._heartbeat.count_finished(end.tier)
        self._outbox.send(report)
        self._metrics.record_report(report)

    # -- intake ------------------------------------------------------------------------------------------------

    async def _take_in(self) -> None:
        """Claim when work was put and when room has come up. Runs beside the step in flight."""
        work = asyncio.create_task(self._queue.wait_for_work(IDLE_S))
        room = asyncio.create_task(self._room.wait())
        try:
            while True:
                await asyncio.wait((work, room), return_when=asyncio.FIRST_COMPLETED)
                if room.done():
                    self._room.clear()
                    room = asyncio.create_task(self._room.wait())
                if work.done():
                    work.result()
                    work = asyncio.create_task(self._queue.wait_for_work(IDLE_S))
                    self._known_empty = False
                self._drop(self._queue.cancelled())
                if not self._draining:
                    await self._claim()
        finally:
            work.cancel()
            room.cancel()

    async def _claim(self) -> None:
        limits = self._core.claim_limits(self._clock.now())
        if not limits or self._known_empty:
            return
        claimed = await self._queue.claim(limits, LEASE_S)
        got = Counter(c.request.tier for c in claimed)
        everything_asked = len(limits) == len(self._core.tiers)
        self._known_empty = everything_asked and all(got[tier] < n for tier, n in limits.items())
        if not claimed:
            return
        self._claimed += got
        now = self._clock.now()
        self._core.accept(claimed, now, self._clock.wall_ms())
        self._send(self._core.refuse(now), now)
        self._changed.set()

    def _drop(self, request_ids: Sequence[str]) -> None:
        tiers = [self._core.tier_of(i) for i in request_ids if self._core.holds(i)]
        if self._core.cancel(request_ids):
            for tier in tiers:
                self._metrics.record_cancelled(tier)
            self._changed.set()

    # -- upkeep ------------------------------------------------------------------------------------------------

    async def _upkeep(self) -> None:
        rounds = 0
        while True:
            await self._clock.sleep(UPDATE_S)
            rounds += 1
            self._count_arrivals(await self._queue.depths([t.name for t in self._core.tiers]))
            self._control()
            self._changed.set()  # an idle loop looks again: budgets change with time, too
            if rounds % HEARTBEAT_EVERY == 0:
                await self._heartbeat.beat(self._clock.now())
            if rounds % RENEW_EVERY == 0:
                await self._renew()
                await self._drop_orphans()
                await self._queue.requeue_expired()

    def _count_arrivals(self, waiting: dict[str, int]) -> None:
        """Whatever was claimed or made the queue longer has arrived; other workers' claims are not seen."""
        for tier, depth in waiting.items():
            arrived = self._claimed[tier] + depth - self._waiting.get(tier, 0)
            self._core.controller.observe_arrivals(tier, max(0, arrived))
        self._claimed.clear()
        self._waiting = waiting

    def _control(self) -> None:
        now = self._clock.now()
        held = {tier.name: self._core.num_held_of(tier.name) for tier in self._core.tiers}
        load = Load(kv_usage=self._core.kv_usage, held=held, waiting=self._waiting)
        decisions = self._core.controller.update(load, now)
        for d in decisions:
            log.info("knob moved", tier=d.tier, knob=d.knob, old=d.old, new=d.new, signal=d.signal, reason=d.reason)
        self._metrics.record_decisions(decisions)
        self._metrics.record_state(self._core, self._waiting, self._core.controller.outputs(now))

    async def _renew(self) -> None:
        leases = self._core.leases()
        kept = await self._queue.renew(leases, LEASE_S) if leases else []
        held = set(self._core.leases())  # not what came back under a newer lease meanwhile
        lost = [lease for lease, ok in zip(leases, kept, strict=True) if not ok]
        if self._core.release([lease.request_id for lease in lost if lease in held]):
            self._changed.set()

    async def _drop_orphans(self) -> None:
        """Drop what a gateway that is gone has asked for: an answer at the end would be computed for nobody."""
        asked: dict[str, list[str]] = {}
        for state in self._core.states:
            asked.setdefault(state.request.reply_to, []).append(state.id)
        for reply_to, request_ids in asked.items():
            if not await self._events.publish(reply_to, ()):
                await self._queue.cancel(request_ids)
                self._drop(request_ids)


async def _first_error_or(main: asyncio.Task[None], others: Sequence[asyncio.Task[None]]) -> None:
    """Wait for `main`; if another task ends first, its error ends the wait."""
    while not main.done():
        done, _ = await asyncio.wait({main, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        others = [t for t in others if not t.done()]
    main.result()
