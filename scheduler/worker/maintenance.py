"""The periodic work of a worker: its heartbeat and, where a controller moves knobs, the outer loop of this controller.

A round takes place every `UPDATE_S` seconds. A heartbeat is sent in every `HEARTBEAT_EVERY`-th round, unless the
driver is stuck: a worker that answers nobody must not look alive.
"""

from collections.abc import Awaitable, Callable, Mapping

import structlog

from scheduler.clock import Clock
from scheduler.control.windows import UPDATE_S
from scheduler.queue.base import Queue
from scheduler.store.outage import StoreOutage
from scheduler.worker.claimer import Claimer
from scheduler.worker.core import WorkerCore
from scheduler.worker.heartbeat import Heartbeat
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.request_intake import RequestIntake

log = structlog.get_logger()

HEARTBEAT_EVERY = 2  # rounds of `UPDATE_S` seconds between two heartbeats


class Maintenance:
    def __init__(
        self,
        heartbeat: Heartbeat,
        outage: StoreOutage,
        clock: Clock,
        is_stuck: Callable[[], bool] = lambda: False,
        review: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`review` is called in each round."""
        self._heartbeat = heartbeat
        self._outage = outage
        self._clock = clock
        self._is_stuck = is_stuck
        self._review = review

    async def run(self) -> None:
        """Run the rounds until this task is cancelled."""
        rounds = 0
        while True:
            await self._clock.sleep(UPDATE_S)
            rounds += 1
            if self._review is not None:
                await self._review()
            if rounds % HEARTBEAT_EVERY == 0 and not self._is_stuck():
                await self._beat()

    async def _beat(self) -> None:
        if await self._outage.attempt(self._heartbeat.beat()):
            self._outage.end()


class ControllerReview:
    """Lets the controller change its knobs, and logs and counts its decisions."""

    def __init__(
        self,
        core: WorkerCore,
        queue: Queue,
        claimer: Claimer,
        metrics: SchedulerMetrics,
        intake: RequestIntake,
        clock: Clock,
    ) -> None:
        self._core = core
        self._claimer = claimer
        self._queue = queue
        self._metrics = metrics
        self._intake = intake
        self._clock = clock
        self._missing: frozenset[str] = frozenset()  # tiers with requests that cannot end by their deadlines

    async def run(self) -> None:
        """Do one review."""
        depths = await self._queue.depths([t.name for t in self._core.held.tiers])
        self._apply(depths)
        await self._claimer.review(depths)
        self._intake.changed.set()  # wakes an idle driver, because budgets also change with time

    def _apply(self, depths: Mapping[str, int]) -> None:
        """`depths` holds the number of requests in the queue, by tier."""
        now = self._clock.now()
        decisions = self._core.review(depths, now)
        for d in decisions:
            said = "knob moved" if d.acted else "knob would move"
            log.info(said, tier=d.tier, knob=d.knob, old=d.old, new=d.new, signal=d.signal, reason=d.reason)
        self._metrics.record_decisions(decisions)
        status = self._core.status(now)
        self._metrics.record_state(status, depths)
        self._warn_of_deadlines({tier: count for tier, count in status.missing_deadlines.items() if count})

    def _warn_of_deadlines(self, missing: Mapping[str, int]) -> None:
        """Log the tiers in which requests begin to miss their deadlines, or have stopped to do so."""
        for tier in missing.keys() - self._missing:
            hint = "interactive SLOs go first: add a worker, or lower the load"
            log.warning("deadlines cannot be kept", tier=tier, requests=missing[tier], hint=hint)
        for tier in self._missing - missing.keys():
            log.info("deadlines can be kept again", tier=tier)
        self._missing = frozenset(missing)
