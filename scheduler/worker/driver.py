"""What a worker and its driver need of each other.

A driver does the work for the requests that the worker holds: steps of an engine (`scheduler.drivers.steps`), or
streams of a server that plans its own steps (`scheduler.drivers.streams`). Everything else is the same for all drivers.
"""

from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.interface import EngineInfo
from scheduler.clock import Clock
from scheduler.holdings.holdings import Holdings
from scheduler.queue.base import Queue
from scheduler.request import Lease
from scheduler.store.outage import StoreOutage
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.claimer import Claimer
from scheduler.worker.core import WorkerCore
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.publisher import Publisher, Reporter
from scheduler.worker.request_intake import RequestIntake


@dataclass
class WorkerContext:
    """The parts of a worker that its driver uses."""

    held: Holdings
    queue: Queue
    intake: RequestIntake
    claimer: Claimer
    reporter: Reporter
    metrics: SchedulerMetrics
    outage: StoreOutage
    clock: Clock
    is_draining: bool = False  # the driver ends when the worker holds no more requests
    is_stopped: bool = False  # the driver ends soon; unfinished requests stay with the worker

    @property
    def is_over(self) -> bool:
        """Whether the driver has nothing left to do."""
        return self.is_stopped or (self.is_draining and not self.held)


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

    def attach(self, worker: WorkerContext) -> None:
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


class RequestWork:
    """A driver with what every driver of requests needs beside it. Implements `scheduler.worker.loop.Work`."""

    def __init__(self, driver: Driver, worker: WorkerContext, publisher: Publisher, checkpointer: Checkpointer) -> None:
        self._driver = driver
        self._worker = worker
        self._publisher = publisher
        self._checkpointer = checkpointer

    @property
    def is_stuck(self) -> bool:
        return self._driver.is_stuck

    async def begin(self) -> list[Lease]:
        await self._checkpointer.save_all()  # of requests that an earlier loop has left in the core
        return await self._driver.clear()

    def beside(self) -> Sequence[Coroutine[Any, Any, None]]:
        claiming, checkpointing = self._worker.claimer.run(), self._checkpointer.run()
        return [self._publisher.run(), claiming, checkpointing, *self._driver.beside()]

    async def run(self) -> None:
        await self._driver.run()
        self._publisher.close()
        await self._publisher.finished.wait()

    async def end(self) -> None:
        await self._checkpointer.save_all()

    def drain(self) -> None:
        self._worker.claimer.close()
        self._worker.is_draining = True
        self._worker.intake.changed.set()

    def stop(self) -> None:
        self._worker.claimer.close()
        self._worker.is_stopped = True
        self._worker.intake.changed.set()
