"""Notices other workers and gateways that have gone silent, and takes care of the work that they leave behind.

The work of a silent worker goes back to the queue, so that another worker can take it over. If that worker wakes up, it
drops this work, because it has lost its leases. The requests of a silent gateway are dropped: nobody reads their
tokens. What parts of jobs have generated stays in the store, for the gateway that asks for them next.
`scheduler.worker.leases` looks after this worker's own work.
"""

from collections import defaultdict

import structlog

from scheduler.clock import Clock
from scheduler.events.base import EventChannel
from scheduler.holdings.holdings import Holdings
from scheduler.queue.base import LeaseStore, Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.heartbeat_monitor import CHECK_S, GATEWAY_SILENT_S, WORKER_SILENT_S, HeartbeatMonitor
from scheduler.store.outage import StoreOutage
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.request_intake import RequestIntake

log = structlog.get_logger()


class Peers:
    """Watches the other workers on `queue`, and the gateways if there are `gateways` to watch."""

    def __init__(
        self,
        queue: LeaseStore,
        registry: WorkerRegistry,
        outage: StoreOutage,
        clock: Clock,
        worker_id: str,
        *,
        serves_tasks: bool = False,
        gateways: "GatewayWatch | None" = None,
    ) -> None:
        self._queue = queue
        self._registry = registry
        self._outage = outage
        self._clock = clock
        self._worker_id = worker_id
        self._serves_tasks = serves_tasks
        self._gateways = gateways
        self._monitor = HeartbeatMonitor(WORKER_SILENT_S)

    async def run(self) -> None:
        """Check the other workers and the gateways every `CHECK_S`, until this task is cancelled.

        While the store is away, nobody is checked, and afterwards every process has its full time again.
        """
        while True:
            if self._outage.lasts:
                self._monitor = HeartbeatMonitor(WORKER_SILENT_S)
                if self._gateways is not None:
                    self._gateways.begin_anew()
            else:
                await self._outage.attempt(self._check())
            await self._clock.sleep(CHECK_S)

    async def _check(self) -> None:
        await self._check_workers()
        if self._gateways is not None:
            await self._gateways.check()

    async def _check_workers(self) -> None:
        all_beats = await self._registry.beats()
        kin = {worker_id: b for worker_id, b in all_beats.items() if bool(b.batch_items) is self._serves_tasks}
        beats = {worker_id: beat.at_ms for worker_id, beat in kin.items() if worker_id != self._worker_id}
        for worker_id in self._monitor.observe(beats):
            requeued = await self._queue.requeue_worker(worker_id)
            was_lost = await self._registry.remove_silent(worker_id)  # it announces itself again if it wakes up
            if was_lost or requeued:  # one that has withdrawn is no more silent than it said
                event = "a worker is silent; its work goes back to the queue"
                log.warning(event, worker=worker_id, count=len(requeued))


class GatewayWatch:
    """Drops the requests of silent gateways."""

    def __init__(
        self, held: Holdings, queue: Queue, events: EventChannel, intake: RequestIntake, checkpointer: Checkpointer
    ) -> None:
        self._held = held
        self._queue = queue
        self._events = events
        self._intake = intake
        self._checkpointer = checkpointer
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all heartbeats that were read."""
        self._monitor = HeartbeatMonitor(GATEWAY_SILENT_S)

    async def check(self) -> None:
        asked: defaultdict[str, list[str]] = defaultdict(list)  # ids of held requests, by gateway
        for state in self._held.states:
            asked[state.request.reply_to].append(state.id)
        gateway_ids = sorted({*asked, *self._monitor.watched})
        beats = dict(zip(gateway_ids, await self._events.beats(gateway_ids), strict=True))
        # A gateway that the store has forgotten, and that has no requests here, need not be remembered here either.
        known = {gateway_id: beat for gateway_id, beat in beats.items() if beat is not None or gateway_id in asked}
        for gateway_id in self._monitor.observe(known):
            if gateway_id in asked:  # any other one may have been stopped in order
                event = "a gateway is silent; its requests are dropped"
                log.warning(event, gateway=gateway_id, count=len(asked[gateway_id]))
        for gateway_id, request_ids in asked.items():
            if self._monitor.is_silent(gateway_id):
                await self._checkpointer.save_parts(self._intake.drop(request_ids))
                await self._queue.cancel(request_ids)
