"""What a worker does beside its steps, twice a second and less often: the controller's outer loop, its heartbeat, its
leases, and dropping what nobody waits for any more.

Knows the core, the queue and the event channel, and how to tell the loop that something has changed; makes no plans and
claims nothing. Owner: `SchedulerLoop`.
"""

from collections.abc import Callable, Mapping, Sequence

import structlog

from scheduler.clock import Clock
from scheduler.control.feedback import UPDATE_S
from scheduler.events.base import EventChannel
from scheduler.planning.core import SchedulerCore
from scheduler.queue.base import Queue
from scheduler.worker.heartbeat import Heartbeat
from scheduler.worker.metrics import SchedulerMetrics

log = structlog.get_logger()

LEASE_S = 10.0
RENEW_EVERY = 6  # rounds
HEARTBEAT_EVERY = 2


class Maintenance:
    """`drop` is told the ids of requests whose gateway is gone; `notify` that the step loop should look again."""

    def __init__(
        self,
        core: SchedulerCore,
        queue: Queue,
        events: EventChannel,
        metrics: SchedulerMetrics,
        heartbeat: Heartbeat,
        clock: Clock,
        drop: Callable[[Sequence[str]], None],
        notify: Callable[[], None],
    ) -> None:
        self._core = core
        self._queue = queue
        self._events = events
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._clock = clock
        self._drop = drop
        self._notify = notify

    async def run(self) -> None:
        """For ever."""
        rounds = 0
        while True:
            await self._clock.sleep(UPDATE_S)
            rounds += 1
            self._control(await self._queue.depths([t.name for t in self._core.tiers]))
            self._notify()  # an idle loop looks again: budgets change with time, too
            if rounds % HEARTBEAT_EVERY == 0:
                await self._heartbeat.beat(self._clock.now(), self._clock.wall_ms())
            if rounds % RENEW_EVERY == 0:
                await self._renew()
                await self._drop_orphans()
                await self._queue.requeue_expired()

    def _control(self, depths: Mapping[str, int]) -> None:
        now = self._clock.now()
        decisions = self._core.review(depths, now)
        for d in decisions:
            said = "knob moved" if d.acted else "knob would move"
            log.info(said, tier=d.tier, knob=d.knob, old=d.old, new=d.new, signal=d.signal, reason=d.reason)
        self._metrics.record_decisions(decisions)
        self._metrics.record_state(self._core.status(now), depths)

    async def _renew(self) -> None:
        leases = [state.lease for state in self._core.states]
        kept = await self._queue.renew(leases, LEASE_S) if leases else []
        held = {state.lease for state in self._core.states}  # not what came back under a newer lease meanwhile
        lost = [lease for lease, ok in zip(leases, kept, strict=True) if not ok]
        if self._core.release([lease.request_id for lease in lost if lease in held]):
            self._notify()

    async def _drop_orphans(self) -> None:
        """Drop what a gateway that is gone has asked for: an answer at the end would be computed for nobody."""
        asked: dict[str, list[str]] = {}
        for state in self._core.states:
            asked.setdefault(state.request.reply_to, []).append(state.id)
        for reply_to, request_ids in asked.items():
            if not await self._events.publish(reply_to, ()):
                await self._queue.cancel(request_ids)
                self._drop(request_ids)
