"""A worker with requests, and its driver.

A driver does the work for the requests that the worker holds: steps of an engine (`scheduler.drivers.steps`), or
streams of a server that plans its own steps (`scheduler.drivers.streams`). Everything else is the same for all drivers.
"""

from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.interface import EngineInfo
from scheduler.clock import Clock
from scheduler.holdings.holdings import Holdings
from scheduler.holdings.report import Report
from scheduler.queue.base import Queue
from scheduler.request import Lease
from scheduler.store.outage import StoreOutage
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.claimer import Claimer
from scheduler.worker.core import WorkerCore
from scheduler.worker.heartbeat import RequestReport
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.publisher import Publisher
from scheduler.worker.request_intake import RequestIntake, RequestTracer


class Driver(Protocol):
    """The part of a worker that works on the requests that it holds."""

    @property
    def core(self) -> WorkerCore: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def unsupported(self) -> Collection[str]:
        """The sampling parameters that the engine cannot honour."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether the driver makes no progress, so that the worker must not look alive."""
        ...

    def attach(self, worker: "RequestWorker") -> None:
        """Use the parts of `worker`. To be called once, before anything runs."""
        ...

    def note_arrived(self, request_ids: Sequence[str], now: float) -> None:
        """Prepare for requests that may start from now on."""
        ...

    async def clear(self) -> list[Lease]:
        """Release all requests that an earlier loop has left in the core, and return their leases."""
        ...

    async def run(self) -> None:
        """Work until the worker's `is_over`, of which `intake.changed` tells."""
        ...

    def beside(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what else runs until `run` ends."""
        ...


@dataclass
class RequestWorker:
    """A driver, and the parts that every driver of requests uses. Implements `scheduler.worker.loop.Work`."""

    driver: Driver
    held: Holdings
    queue: Queue
    intake: RequestIntake
    claimer: Claimer
    publisher: Publisher
    checkpointer: Checkpointer
    metrics: SchedulerMetrics
    described: RequestReport
    outage: StoreOutage
    clock: Clock
    tracer: RequestTracer | None = None
    is_draining: bool = False
    is_stopped: bool = False

    def __post_init__(self) -> None:
        self.driver.attach(self)

    @property
    def is_over(self) -> bool:
        """Whether the driver has nothing left to do."""
        return self.is_stopped or (self.is_draining and not self.held)

    @property
    def is_stuck(self) -> bool:
        return self.driver.is_stuck

    def send(self, report: Report) -> None:
        """Send what the driver reports, and count and trace it."""
        for end in report.ended:
            self.described.count_ended(end)
        self.publisher.send(report)
        self.metrics.record_report(report)
        if self.tracer is not None:
            for state in report.traced:
                self.tracer.record(state, self.clock.now())

    async def begin(self) -> list[Lease]:
        await self.checkpointer.save_all()  # of requests that an earlier loop has left in the core
        return await self.driver.clear()

    def beside(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self.publisher.run(), self.claimer.run(), self.checkpointer.run(), *self.driver.beside()]

    async def run(self) -> None:
        await self.driver.run()
        self.publisher.close()
        await self.publisher.finished.wait()

    async def end(self) -> None:
        await self.checkpointer.save_all()

    def drain(self) -> None:
        self.is_draining = True
        self._end_claims()

    def stop(self) -> None:
        self.is_stopped = True
        self._end_claims()

    def _end_claims(self) -> None:
        self.claimer.close()
        self.intake.changed.set()
