"""The driver of a static endpoint: look at the queue, claim a batch, call, write its results.

There are no steps and no tokens, only calls. Makes no decisions: `policy` says when to call and for whom, `settled`
what a result means. Tasks are claimed at the start of a call and not before, so an interactive task that comes while a
batch is waiting is in it, and bulk gets what is left.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

import structlog
from redis.backoff import ExponentialBackoff

from engine.static.interface import CallFailed, Endpoint, Unreachable
from scheduler.clock import Clock
from scheduler.drivers.calls import settled
from scheduler.drivers.calls.busy_spells import BusySpells, Verdict
from scheduler.drivers.calls.metrics import TaskMetrics, TaskReport
from scheduler.drivers.calls.policy import BatchPolicy, CallPlan, LaneWait, Wait, without
from scheduler.drivers.calls.results import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    CallTrace,
    TaskResults,
    TaskTracer,
    until_written,
)
from scheduler.drivers.calls.settled import SettledTask
from scheduler.registry.base import WorkerRegistry
from scheduler.request import Lease
from scheduler.store.errors import STORE_AWAY
from scheduler.store.outage import StoreOutage
from scheduler.tasks.queue import TaskQueue
from scheduler.tasks.task import ClaimedTask
from scheduler.worker.heartbeat import Heartbeat, WorkerIdentity
from scheduler.worker.leases import LEASE_S, LeaseKeeper
from scheduler.worker.loop import WorkerLoop
from scheduler.worker.maintenance import Maintenance
from scheduler.worker.peers import Peers

log = structlog.get_logger()

LISTEN_S = 0.5  # longest wait for a wake-up from the queue, because one may be lost
MAX_RETRY_AFTER_S = 30.0  # the longest Retry-After of an endpoint that is obeyed


def build_call_loop(
    endpoint: Endpoint,
    policy: BatchPolicy,
    queue: TaskQueue,
    registry: WorkerRegistry,
    metrics: TaskMetrics,
    clock: Clock,
    identity: WorkerIdentity,
    tracer: TaskTracer | None = None,
) -> WorkerLoop:
    """Return a loop that serves tasks with `endpoint`, and is ready to run.

    The loop closes `queue` at its end. All other parts outlive it. While the store is away, a call under way goes on.
    """
    worker_id, outage = identity.worker_id, StoreOutage(*STORE_AWAY)
    report = TaskReport(identity, endpoint.name, policy.batch)
    results = TaskResults(queue, metrics, report, clock, tracer)
    driver = CallDriver(endpoint, policy, queue, results, metrics, clock, tracer)
    heartbeat = Heartbeat(registry, report, clock, identity)
    leases = LeaseKeeper(driver, queue, outage, clock, identity)
    peers = Peers(queue, registry, outage, clock, worker_id, serves_tasks=True)
    return WorkerLoop(driver, queue, leases, peers, Maintenance(heartbeat, outage, clock), heartbeat)


class CallDriver:
    """Implements `scheduler.worker.loop.Work` and `scheduler.worker.leases.LeaseHolder`."""

    def __init__(
        self,
        endpoint: Endpoint,
        policy: BatchPolicy,
        queue: TaskQueue,
        results: TaskResults,
        metrics: TaskMetrics,
        clock: Clock,
        tracer: TaskTracer | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._policy = policy
        self._queue = queue
        self._results = results
        self._metrics = metrics
        self._clock = clock
        self._tracer = tracer
        self._held: list[ClaimedTask] = []
        self._backoff = ExponentialBackoff(cap=MAX_PAUSE_S, base=FIRST_PAUSE_S)
        self._num_failed = 0  # calls in a row that failed as a whole
        self._spells = BusySpells()
        self._oldest_s: dict[tuple[str, int], float] = {}  # since when the oldest task of a lane waits, by its arrival
        self._serving: asyncio.Task[None] | None = None
        self._draining = asyncio.Event()
        self.is_stuck = False  # a hanging function raises `EndpointHangs` and ends the process instead

    # -- the worker's loop and leases --------------------------------------------------------------------------

    def leases(self) -> list[Lease]:
        return [Lease(claimed.task.id, claimed.fence) for claimed in self._held]

    def release(self, ids: Iterable[str]) -> None:
        """Do nothing: the call goes on for the others, and the store takes no result without its lease."""

    def release_all(self) -> list[Lease]:
        leases, self._held = self.leases(), []
        return leases

    async def begin(self) -> list[Lease]:
        return []

    def beside(self) -> Sequence[Coroutine[Any, Any, None]]:
        return []

    async def end(self) -> None:
        return None

    def drain(self) -> None:
        """Claim no more tasks. `run` returns when the call under way has ended."""
        self._draining.set()
        self._queue.wake()

    def stop(self) -> None:
        """Make `run` return now."""
        self.drain()
        if self._serving is not None:
            self._serving.cancel()

    async def run(self) -> None:
        self._serving = asyncio.create_task(self._serve())
        try:
            await asyncio.wait([self._serving])
            if not self._serving.cancelled():
                self._serving.result()
        finally:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    # -- calls -------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while not self._draining.is_set():
            waiting = await self._waiting()
            now = self._clock.now()
            self._policy.observe(waiting, now)
            self._metrics.record_waiting(self._counts(waiting), self._policy.wait_s)
            match self._policy.decide(waiting, now):
                case Wait(until_s):
                    await self._queue.wait_for_work(min(LISTEN_S, max(0.0, until_s - now)))
                case CallPlan() as plan:
                    await self._run(plan, waiting)

    async def _waiting(self) -> dict[str, LaneWait]:
        """Return the lanes in which tasks wait, since they were first seen here or longer.

        By wall clocks alone, a task from a machine whose clock is ahead would seem to come only now, at each look.
        """
        depths = await self._queue.depths(self._policy.lanes)
        now, wall_ms = self._clock.now(), self._clock.wall_ms()
        waiting = {(lane, d.oldest_ms): max(0, wall_ms - d.oldest_ms) / 1000 for lane, d in depths.items() if d.count}
        self._oldest_s = {key: min(now - age_s, self._oldest_s.get(key, now)) for key, age_s in waiting.items()}
        return {lane: LaneWait(depths[lane].count, oldest_s) for (lane, _), oldest_s in self._oldest_s.items()}

    def _counts(self, waiting: Mapping[str, LaneWait]) -> dict[str, int]:
        return {lane: waiting[lane].count if lane in waiting else 0 for lane in self._policy.lanes}

    async def _run(self, plan: CallPlan, waiting: Mapping[str, LaneWait]) -> None:
        """Claim the tasks of `plan` and call the endpoint with them."""
        others = {lane: 0 for lane in self._policy.lanes if lane not in plan.limits}
        self._held = await self._queue.claim({**plan.limits, **others}, LEASE_S)
        self._note_claimed(plan, len(self._held))
        num_planned = sum(plan.limits.values()) - await self._set_aside()
        if not plan.is_isolated and not self._is_worth_it(num_planned):
            await self._give_back(plan)
        if self._held:
            await self._call(plan, without(waiting, _counted(self._held)))

    def _note_claimed(self, plan: CallPlan, count: int) -> None:
        if not plan.is_isolated:
            self._policy.note_claimed(count)

    async def _set_aside(self) -> int:
        """End the claimed tasks that have waited too long, and isolate those during whose last try a worker died.

        The latter may have been the cause. Return their number.
        """
        wall_ms = self._clock.wall_ms()
        before = [settled.before_call(c, wall_ms) for c in self._held]
        if aside := [o for o in before if o is not None]:
            await self._results.write(aside)
            self._held = [c for c, o in zip(self._held, before, strict=True) if o is None]
        return len(aside)

    def _is_worth_it(self, num_planned: int) -> bool:
        """Return whether the claimed tasks should be called now: others may have claimed what was planned for."""
        if len(self._held) >= num_planned:
            return True
        now, wall_ms, counts = self._clock.now(), self._clock.wall_ms(), _counted(self._held)
        oldest_ms = {tier: min(c.task.arrival_ms for c in self._held if c.task.tier == tier) for tier in counts}
        waits = {t: LaneWait(n, now - max(0, wall_ms - oldest_ms[t]) / 1000) for t, n in counts.items()}
        return self._policy.is_due(waits, now)

    async def _give_back(self, plan: CallPlan) -> None:
        await until_written(lambda: self._queue.release(self.leases()))
        self._note_claimed(plan, -len(self._held))
        self._held = []

    async def _call(self, plan: CallPlan, left: Mapping[str, LaneWait]) -> None:
        """Call the endpoint with the held tasks. `left` is what else waited, which also wanted places in the batch."""
        claimed, begun_s = self._held, self._clock.now()
        counts = _counted(claimed)
        tasks = [c.task for c in claimed]
        trace = self._tracer.begin_call(tasks, self._policy.batch) if self._tracer is not None else None
        # Without a trace of its own, the call goes on with that of its first task.
        traceparent = tasks[0].traceparent if trace is None else trace.traceparent
        try:
            results = await self._endpoint.call([task.input for task in tasks], traceparent)
        except Unreachable as error:
            _end(trace, "unreachable")
            self._metrics.record_call(claimed, self._policy.batch, 0.0, "unreachable")
            await self._give_back(plan)
            await self._pause(str(error), FIRST_PAUSE_S)
        except CallFailed as error:
            said = "busy" if error.is_busy else "failed"
            _end(trace, said)
            if error.is_busy:
                self._policy.note_turn(plan)
                self._metrics.record_call(claimed, self._policy.batch, self._clock.now() - begun_s, said)
            else:
                self._record(plan, counts, left, begun_s, said)
            ended_or_retried = self._settle(plan, error)
            if ended_or_retried is None:
                await self._give_back(plan)
            else:
                await self._results.write(ended_or_retried, trace)
                self._held = []
            await self._pause(str(error), max(FIRST_PAUSE_S, error.retry_after_s) if error.is_busy else 0.0)
        else:
            _end(trace, "ok")
            self._record(plan, counts, left, begun_s, "ok")
            self._num_failed = 0
            self._spells.note_served(plan.is_isolated)
            await self._results.write(settled.of_results(claimed, results), trace)
            self._held = []

    def _settle(self, plan: CallPlan, error: CallFailed) -> list[SettledTask] | None:
        """Return what becomes of the held tasks after a failed call. None: they go back to their places, uncounted."""
        if not error.is_busy:
            return settled.of_failure(self._held, error, self._policy.may_isolate)
        match self._spells.judge(plan.is_isolated, len(self._held), error.excused_s, self._clock.now()):
            case Verdict.BLAME:
                return settled.of_blamed(self._held, error)
            case Verdict.SET_APART if self._policy.may_isolate:
                return settled.set_apart(self._held, plan.is_isolated)
        return None

    def _record(
        self, plan: CallPlan, slots: Mapping[str, int], left: Mapping[str, LaneWait], begun_s: float, said: str
    ) -> None:
        now = self._clock.now()
        took_s = now - begun_s
        self._policy.end_call(plan, slots, left, took_s, now)
        self._metrics.record_call(self._held, self._policy.batch, took_s, said)

    async def _pause(self, reason: str, shortest_s: float) -> None:
        """Leave an endpoint alone for a while after a whole call has failed."""
        backoff_s = self._backoff.compute(self._num_failed) if self._num_failed else 0.0
        pause_s = max(backoff_s, min(shortest_s, MAX_RETRY_AFTER_S))
        self._num_failed += 1
        if self._num_failed & (self._num_failed - 1) == 0:  # the first, second, fourth … in a row
            log.warning("a call of the endpoint failed", reason=reason, in_a_row=self._num_failed, pause_s=pause_s)
        pausing = asyncio.ensure_future(self._clock.sleep(pause_s))
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait((pausing, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            pausing.cancel()
            draining.cancel()


def _end(trace: CallTrace | None, said: str) -> None:
    if trace is not None:
        trace.end(said)


def _counted(claimed: Sequence[ClaimedTask]) -> dict[str, int]:
    return dict(Counter(c.task.tier for c in claimed))
