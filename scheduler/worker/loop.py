"""The main loop of a worker, with any driver, clock and queue. The simulator runs the same loop.

Small tasks share the core on one thread: the driver, claims, publishing, checkpoints, leases, peers and maintenance.
`build_loop` builds them.
"""

import asyncio
from collections.abc import Sequence

from scheduler.clock import Clock
from scheduler.events.base import EventChannel
from scheduler.queue.base import Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.store.outage import StoreOutage
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.claimer import Claimer
from scheduler.worker.driver import Driver, WorkerContext
from scheduler.worker.heartbeat import Heartbeat, ReadGpus, WorkerIdentity
from scheduler.worker.leases import LeaseKeeper
from scheduler.worker.maintenance import Maintenance
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.peers import Peers
from scheduler.worker.publisher import Publisher, Reporter
from scheduler.worker.request_intake import RequestIntake, RequestTracer


def build_loop(
    driver: Driver,
    queue: Queue,
    events: EventChannel,
    registry: WorkerRegistry,
    metrics: SchedulerMetrics,
    clock: Clock,
    identity: WorkerIdentity,
    read_gpus: ReadGpus | None = None,
    tracer: RequestTracer | None = None,
) -> "SchedulerLoop":
    """Return a loop that is ready to run.

    The loop closes `queue` at its end. The driver's core and engine, and all other parts, outlive the loop, so that a
    later loop can continue with them.
    """
    core, held, outage = driver.core, driver.core.held, StoreOutage()
    intake = RequestIntake(held, metrics, clock, driver.note_arrived, tracer)
    heartbeat = Heartbeat(registry, metrics, core, driver.info, identity, clock, driver.unsupported, read_gpus)
    checkpointer = Checkpointer(held, queue, outage, clock)
    publisher = Publisher(queue, events, intake, checkpointer, outage, clock)
    peers = Peers(held, queue, events, registry, intake, checkpointer, outage, clock, identity.worker_id)
    claimer = Claimer(core, queue, intake, peers, outage, clock)
    reporter = Reporter(publisher, metrics, heartbeat, clock, tracer)
    worker = WorkerContext(held, queue, intake, claimer, reporter, metrics, outage, clock)
    driver.attach(worker)
    leases = LeaseKeeper(held, queue, intake, outage, clock, identity.worker_id)
    maintenance = Maintenance(core, queue, metrics, heartbeat, intake, driver, outage, clock)
    return SchedulerLoop(driver, worker, publisher, checkpointer, leases, peers, maintenance, heartbeat)


class SchedulerLoop:
    def __init__(
        self,
        driver: Driver,
        worker: WorkerContext,
        publisher: Publisher,
        checkpointer: Checkpointer,
        leases: LeaseKeeper,
        peers: Peers,
        maintenance: Maintenance,
        heartbeat: Heartbeat,
    ) -> None:
        self._driver = driver
        self._worker = worker
        self._publisher = publisher
        self._checkpointer = checkpointer
        self._leases = leases
        self._peers = peers
        self._maintenance = maintenance
        self._heartbeat = heartbeat
        self.is_announced = False  # whether the first heartbeat was sent

    @property
    def is_stuck(self) -> bool:
        """Whether the driver makes no progress."""
        return self._driver.is_stuck

    async def run(self) -> None:
        """Serve until `drain` was called and all held requests have ended, or until `stop` was called.

        Any error ends all tasks and is raised. A new loop may then continue with the same engine and core.
        """
        try:
            await self._checkpointer.save_all()  # of requests that an earlier loop has left in the core
            await self._leases.give_back(await self._driver.clear())
            await self._heartbeat.beat()
            self.is_announced = True
            await self._run_tasks()
            await self._checkpointer.save_all()
            await self._leases.give_back()
            await self._heartbeat.withdraw()
        finally:
            await self._worker.queue.close()

    async def _run_tasks(self) -> None:
        publishing = asyncio.create_task(self._publisher.run())
        background = [
            publishing,
            asyncio.create_task(self._worker.claimer.run()),
            asyncio.create_task(self._maintenance.run()),
            asyncio.create_task(self._checkpointer.run()),
            asyncio.create_task(self._leases.run()),
            asyncio.create_task(self._peers.run()),
            *map(asyncio.create_task, self._driver.beside()),
        ]
        driving = asyncio.create_task(self._driver.run())
        try:
            await _first_error_or(driving, background)
            self._publisher.close()
            await publishing
        finally:
            for task in (driving, *background):
                task.cancel()
            await asyncio.gather(driving, *background, return_exceptions=True)

    def drain(self) -> None:
        """Claim no more requests. `run` returns when all held requests have ended."""
        self._worker.claimer.close()
        self._worker.is_draining = True
        self._worker.intake.changed.set()

    def stop(self) -> None:
        """Make `run` return soon. Unfinished requests go back to the queue."""
        self._worker.claimer.close()
        self._worker.is_stopped = True
        self._worker.intake.changed.set()


async def _first_error_or(main: "asyncio.Task[None]", others: "Sequence[asyncio.Task[None]]") -> None:
    """Wait until `main` has ended, and raise its error if it has one. If another task fails first, raise that error."""
    while not main.done():
        done, _ = await asyncio.wait({main, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        others = [t for t in others if not t.done()]
    main.result()
