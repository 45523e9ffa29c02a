"""What a worker does beside its steps, twice a second and less often: the controller's outer loop, its heartbeat, its
leases, and dropping what nobody waits for any more.

Knows the core, the queue and the event channel, and how to tell the loop that something has changed; makes no plans and
claims nothing. Owner: `SchedulerLoop`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import structlog

from engine.step_time.cost import StepCost
from scheduler.clock import Clock
from scheduler.control.feedback import UPDATE_S, Load
from scheduler.deadlines import age_share
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
        self._waiting: dict[str, int] = {}
        self._claimed: Counter[str] = Counter()  # since the last look at the depths

    @property
    def waiting(self) -> Mapping[str, int]:
        """In the queue, by tier, when it was last looked at."""
        return self._waiting

    def count_claimed(self, claimed: Mapping[str, int]) -> None:
        self._claimed.update(claimed)

    async def run(self) -> None:
        """For ever."""
        rounds = 0
        while True:
            await self._clock.sleep(UPDATE_S)
            rounds += 1
            self._count_arrivals(await self._queue.depths([t.name for t in self._core.tiers]))
            self._control()
            self._notify()  # an idle loop looks again: budgets change with time, too
            if rounds % HEARTBEAT_EVERY == 0:
                await self._heartbeat.beat(self._clock.now(), self._clock.wall_ms())
            if rounds % RENEW_EVERY == 0:
                await self._renew()
                await self._drop_orphans()
                await self._queue.requeue_expired()

    def _count_arrivals(self, waiting: dict[str, int]) -> None:
        """Whatever was claimed or made the queue longer has arrived; other workers' claims are not seen."""
        waiting = {t.name: waiting.get(t.name, 0) for t in self._core.tiers}  # they may have changed since it asked
        for tier, depth in waiting.items():
            arrived = self._claimed[tier] + depth - self._waiting.get(tier, 0)
            self._core.controller.observe_arrivals(tier, max(0, arrived))
        self._claimed.clear()
        self._waiting = waiting

    def _control(self) -> None:
        now = self._clock.now()
        self._core.review(now)
        cost = self._core.step_time.cost(mixed=False)
        held = {tier.name: self._core.table.count(tier.name) for tier in self._core.tiers}
        load = Load(
            kv_usage=self._core.kv_usage,
            held=held,
            waiting=self._waiting,
            age_share=age_share(self._core.table.interactive(), now),
            step_s=cost.step_s,
            decodes_s=self._decodes_s(cost),
        )
        decisions = self._core.controller.update(load, now)
        for d in decisions:
            said = "knob moved" if d.acted else "knob would move"
            log.info(said, tier=d.tier, knob=d.knob, old=d.old, new=d.new, signal=d.signal, reason=d.reason)
        self._metrics.record_decisions(decisions)
        self._metrics.record_state(self._core, self._waiting, self._core.controller.outputs(now))

    def _decodes_s(self, cost: StepCost) -> dict[str, float]:
        """How long a step of all decodes of an interactive tier takes, and nothing else in it."""
        work_s: defaultdict[str, float] = defaultdict(float)
        for state in self._core.table.interactive():
            if state.is_decode:
                work_s[state.tier.name] += cost.decode(state.num_computed_tokens)
        return {tier: cost.step(seconds) for tier, seconds in work_s.items()}

    async def _renew(self) -> None:
        leases = self._core.table.leases()
        kept = await self._queue.renew(leases, LEASE_S) if leases else []
        held = set(self._core.table.leases())  # not what came back under a newer lease meanwhile
        lost = [lease for lease, ok in zip(leases, kept, strict=True) if not ok]
        if self._core.release([lease.request_id for lease in lost if lease in held]):
            self._notify()

    async def _drop_orphans(self) -> None:
        """Drop what a gateway that is gone has asked for: an answer at the end would be computed for nobody."""
        asked: dict[str, list[str]] = {}
        for state in self._core.table:
            asked.setdefault(state.request.reply_to, []).append(state.id)
        for reply_to, request_ids in asked.items():
            if not await self._events.publish(reply_to, ()):
                await self._queue.cancel(request_ids)
                self._drop(request_ids)
