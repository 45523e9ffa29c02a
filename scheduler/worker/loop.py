"""The main loop of a worker, with any work, clock and queue. The simulator runs the same loop.

Small tasks share one thread: the work and what it needs beside it, maintenance, leases and peers. `build_loop` builds
the loop for requests; `scheduler.drivers.calls.driver` builds it for tasks.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from scheduler.clock import Clock
from scheduler.events.base import EventChannel
from scheduler.queue.base import LeaseStore, Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.request import Lease
from scheduler.store.outage import StoreOutage
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.claimer import Claimer, Takeover
from scheduler.worker.driver import Driver, RequestWorker
from scheduler.worker.heartbeat import DuplicateWorker, Heartbeat, ReadGpus, RequestReport, WorkerIdentity
from scheduler.worker.leases import LeaseKeeper
from scheduler.worker.maintenance import ControllerReview, Maintenance
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.peers import GatewayWatch, Peers
from scheduler.worker.publisher import Publisher
from scheduler.worker.request_intake import RequestIntake, RequestTracer


class Work(Protocol):
    """What a worker does between its claims and its results."""

    @property
    def is_stuck(self) -> bool:
        """Whether nothing progresses, so that the worker must not look alive."""
        ...

    async def begin(self) -> list[Lease]:
        """Drop what an earlier loop has left, and return its leases."""
        ...

    async def run(self) -> None:
        """Work until `drain` was called and what is held has ended, or until `stop` was called."""
        ...

    def beside(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what else runs until `run` ends."""
        ...

    async def end(self) -> None:
        """Save what the next holder can use, before everything that is held goes back to the queue."""
        ...

    def drain(self) -> None:
        """Claim nothing more. `run` returns when everything that is held has ended."""
        ...

    def stop(self) -> None:
        """Make `run` return soon."""
        ...


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
) -> "WorkerLoop":
    """Return a loop that serves requests with `driver`, and is ready to run.

    The loop closes `queue` at its end. The driver's core and engine, and all other parts, outlive the loop, so that a
    later loop can continue with them.
    """
    core, held, worker_id, outage = driver.core, driver.core.held, identity.worker_id, StoreOutage()
    report = RequestReport(core, driver.info, identity, driver.unsupported, read_gpus)
    intake = RequestIntake(held, metrics, clock, driver.note_arrived, tracer)
    checkpointer = Checkpointer(held, queue, outage, clock)
    publisher = Publisher(queue, events, intake, checkpointer, outage, clock)
    gateways = GatewayWatch(held, queue, events, intake, checkpointer)
    peers = Peers(queue, registry, outage, clock, worker_id, gateways=gateways)
    takeover = Takeover(queue, events, intake)
    claimer = Claimer(core, queue, intake, takeover, outage, clock, lambda: driver.is_stuck, identity.vocabulary)
    worker = RequestWorker(
        driver, held, queue, intake, claimer, publisher, checkpointer, metrics, report, outage, clock, tracer
    )
    heartbeat = Heartbeat(registry, report, clock, identity)
    review = ControllerReview(core, queue, claimer, metrics, intake, clock)
    maintenance = Maintenance(heartbeat, outage, clock, lambda: driver.is_stuck, review.run)
    leases = LeaseKeeper(intake, queue, outage, clock, identity)
    return WorkerLoop(worker, queue, leases, peers, maintenance, heartbeat, lambda: claimer.why_idle)


class WorkerLoop:
    def __init__(
        self,
        work: Work,
        queue: LeaseStore,
        leases: LeaseKeeper,
        peers: Peers,
        maintenance: Maintenance,
        heartbeat: Heartbeat,
        why_idle: Callable[[], str] = lambda: "",
    ) -> None:
        """`why_idle` returns why the worker claims nothing, though it could; an empty string if it does."""
        self._work = work
        self._queue = queue
        self._leases = leases
        self._peers = peers
        self._maintenance = maintenance
        self._heartbeat = heartbeat
        self.why_idle = why_idle

    @property
    def is_announced(self) -> bool:
        """Whether the store knows the worker: it has a heartbeat that is not too old."""
        return self._heartbeat.is_known

    @property
    def is_stuck(self) -> bool:
        return self._work.is_stuck

    async def run(self) -> None:
        """Serve until `drain` was called and everything that is held has ended, or until `stop` was called.

        Any error ends all tasks and is raised. A new loop may then continue with the same engine and core.
        """
        try:
            await self._heartbeat.await_namesake()
            await self._leases.begin_anew(await self._work.begin())
            await self._heartbeat.beat()
            await self._run_tasks()
            await self._work.end()
            await self._leases.give_back()
            await self._heartbeat.withdraw()
        except DuplicateWorker:
            await self._leases.give_back()
            raise
        finally:
            await self._queue.close()

    async def _run_tasks(self) -> None:
        others = [*self._work.beside(), self._maintenance.run(), self._leases.run(), self._peers.run()]
        background = [asyncio.create_task(run) for run in others]
        working = asyncio.create_task(self._work.run())
        try:
            await _first_error_or(working, background)
        finally:
            for task in (working, *background):
                task.cancel()
            await asyncio.gather(working, *background, return_exceptions=True)

    def drain(self) -> None:
        """Claim nothing more. `run` returns when everything that is held has ended."""
        self._work.drain()

    def stop(self) -> None:
        """Make `run` return soon. What has not ended goes back to the queue."""
        self._work.stop()


async def _first_error_or(main: "asyncio.Task[None]", others: "Sequence[asyncio.Task[None]]") -> None:
    """Wait until `main` has ended, and raise its error if it has one. If another task fails first, raise that error."""
    while not main.done():
        done, _ = await asyncio.wait({main, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        others = [t for t in others if not t.done()]
    main.result()
