"""Notices other workers and gateways that have gone silent, and takes care of the work that they leave behind.

The requests of a silent worker go back to the queue, so that another worker can take them over. If that worker wakes
up, it drops them, because it has lost their leases. The requests of a silent gateway are dropped: nobody reads their
tokens. What parts of jobs have generated stays in the store, for the gateway that asks for them next. This worker's own
requests are looked after by `scheduler.worker.leases`.
"""

from collections import defaultdict

import structlog

from scheduler.clock import Clock
from scheduler.events.base import EventChannel
from scheduler.holdings.holdings import Holdings
from scheduler.queue.base import Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.heartbeat_monitor import CHECK_S, GATEWAY_SILENT_S, WORKER_SILENT_S, HeartbeatMonitor
from scheduler.store.outage import StoreOutage
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.request_intake import RequestIntake

log = structlog.get_logger()


class Peers:
    def __init__(
        self,
        held: Holdings,
        queue: Queue,
        events: EventChannel,
        registry: WorkerRegistry,
        intake: RequestIntake,
        checkpointer: Checkpointer,
        outage: StoreOutage,
        clock: Clock,
        worker_id: str,
    ) -> None:
        self._held = held
        self._queue = queue
        self._events = events
        self._registry = registry
        self._intake = intake
        self._checkpointer = checkpointer
        self._outage = outage
        self._clock = clock
        self._worker_id = worker_id
        self._watch_anew()
        self.is_alone = True  # whether no other worker was alive at the last check

    async def run(self) -> None:
        """Check the other workers and the gateways every `CHECK_S`, until this task is cancelled.

        While the store refuses writes, nobody is checked.
        """
        while True:
            if self._outage.is_refused:
                self._watch_anew()
            else:
                await self._outage.attempt(self._check())
            await self._clock.sleep(CHECK_S)

    def _watch_anew(self) -> None:
        """Forget all heartbeats that were read, so that every process has its full time again."""
        self._workers = HeartbeatMonitor(WORKER_SILENT_S)
        self._gateways = HeartbeatMonitor(GATEWAY_SILENT_S)

    async def _check(self) -> None:
        await self._check_workers()
        await self._check_gateways()

    async def _check_workers(self) -> None:
        others = [w for w in await self._registry.workers() if w.worker_id != self._worker_id and not w.batch_items]
        beats = {w.worker_id: w.at_ms for w in others}
        for worker_id in self._workers.observe(beats):
            requeued = await self._queue.requeue_worker(worker_id)
            log.warning("a worker is silent; its requests go back to the queue", worker=worker_id, count=len(requeued))
        self.is_alone = all(self._workers.is_silent(worker_id) for worker_id in beats)

    async def _check_gateways(self) -> None:
        asked: defaultdict[str, list[str]] = defaultdict(list)
        for state in self._held.states:
            asked[state.request.reply_to].append(state.id)
        gateway_ids = sorted({*asked, *self._gateways.watched})
        beats = dict(zip(gateway_ids, await self._events.beats(gateway_ids), strict=True))
        # A gateway that the store has forgotten, and that has no requests here, need not be remembered here either.
        known = {gateway_id: beat for gateway_id, beat in beats.items() if beat is not None or gateway_id in asked}
        for gateway_id in self._gateways.observe(known):
            log.warning("a gateway is silent; its requests are dropped", gateway=gateway_id)
        for gateway_id, request_ids in asked.items():
            if self._gateways.is_silent(gateway_id):
                await self._checkpointer.save_parts(self._intake.drop(request_ids))
                await self._queue.cancel(request_ids)
