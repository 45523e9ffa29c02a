"""The heartbeat of a worker with a static endpoint, and the look at the heartbeats of others like it.

Tasks of a worker that has gone silent go back to the queue.
"""

from collections import Counter

import structlog

from engine.step_time.ewma import Ewma
from scheduler.clock import Clock
from scheduler.drivers.calls.metrics import TaskMetrics
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.heartbeat_monitor import CHECK_S, WORKER_SILENT_S, HeartbeatMonitor
from scheduler.registry.worker_status import TierStatus, WorkerStatus
from scheduler.store.errors import STORE_AWAY
from scheduler.tasks.queue import TaskQueue
from scheduler.tasks.task import EndedTask

log = structlog.get_logger()

BEAT_EVERY = 2  # rounds of `CHECK_S` seconds between two heartbeats
RATE_WEIGHT = 0.2  # weight of the newest heartbeat in the average rate of ended tasks


class TaskHeartbeat:
    def __init__(
        self,
        registry: WorkerRegistry,
        queue: TaskQueue,
        metrics: TaskMetrics,
        clock: Clock,
        worker_id: str,
        endpoint: str,
        batch: int,
    ) -> None:
        self._registry = registry
        self._queue = queue
        self._metrics = metrics
        self._clock = clock
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._batch = batch
        self._started_ms = clock.wall_ms()
        self._peers = HeartbeatMonitor(WORKER_SILENT_S)
        self._ended: Counter[str] = Counter()  # tasks since the last heartbeat, by tier
        self._per_s: dict[str, Ewma] = {}
        self._last_s: float | None = None

    def count_ended(self, ended: EndedTask) -> None:
        self._ended[ended.task.tier] += 1

    async def run(self) -> None:
        """Send heartbeats and look at others', until this task is cancelled.

        While the store is away, a call under way goes on. Nobody could send heartbeats meanwhile, so nobody is silent.
        """
        rounds, is_away = 0, False
        while True:
            await self._clock.sleep(CHECK_S)
            rounds += 1
            try:
                await self._check_peers()
                if rounds % BEAT_EVERY == 0:
                    await self.beat()
                    is_away = False
            except STORE_AWAY as error:
                self._peers = HeartbeatMonitor(WORKER_SILENT_S)
                if not is_away:
                    log.warning("the store is away; a call under way goes on", error=str(error))
                is_away = True

    async def beat(self) -> None:
        now = self._clock.now()
        if self._last_s is not None:
            self._update_rates(max(now - self._last_s, 1e-3))
        self._last_s = now
        tiers = {
            tier: TierStatus(batch_size=self._batch, finished_per_s=rate.value) for tier, rate in self._per_s.items()
        }
        status = WorkerStatus(
            worker_id=self._worker_id,
            model_names=(),
            max_model_len=0,
            vocab_size=0,
            started_ms=self._started_ms,
            device=self._endpoint,
            tiers=tiers,
            at_ms=self._clock.wall_ms(),
            batch_items=self._batch,
        )
        await self._registry.announce(status, self._metrics.text())

    async def withdraw(self) -> None:
        await self._registry.withdraw(self._worker_id)

    def _update_rates(self, interval_s: float) -> None:
        for tier in {*self._per_s, *self._ended}:
            rate = self._ended[tier] / interval_s
            self._per_s.setdefault(tier, Ewma(RATE_WEIGHT, rate)).add(rate)
        self._ended.clear()

    async def _check_peers(self) -> None:
        others = [w for w in await self._registry.workers() if w.batch_items and w.worker_id != self._worker_id]
        for worker_id in self._peers.observe({w.worker_id: w.at_ms for w in others}):
            requeued = await self._queue.requeue_worker(worker_id)
            log.warning("a worker is silent; its tasks go back to the queue", worker=worker_id, count=len(requeued))
