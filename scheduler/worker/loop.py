"""The main loop of a worker, with any driver, clock and queue. The simulator runs the same loop.

Small tasks share the core on one thread: the driver, claims, publishing, checkpoints, leases, peers and maintenance.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from scheduler.queue.base import Queue
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.claimer import Claimer
from scheduler.worker.core import Driver
from scheduler.worker.heartbeat import Heartbeat
from scheduler.worker.leases import LeaseKeeper
from scheduler.worker.maintenance import Maintenance
from scheduler.worker.peers import Peers
from scheduler.worker.publisher import Publisher


class SchedulerLoop:
    def __init__(
        self,
        driver: Driver,
        claimer: Claimer,
        publisher: Publisher,
        checkpointer: Checkpointer,
        leases: LeaseKeeper,
        peers: Peers,
        maintenance: Maintenance,
        heartbeat: Heartbeat,
        queue: Queue,
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """`beside` is what else the driver runs until it ends."""
        self._driver = driver
        self._claimer = claimer
        self._beside = beside
        self._publisher = publisher
        self._checkpointer = checkpointer
        self._leases = leases
        self._peers = peers
        self._maintenance = maintenance
        self._heartbeat = heartbeat
        self._queue = queue
        self.is_announced = False  # whether the first heartbeat was sent

    @property
    def is_stuck(self) -> bool:
        """Whether the driver makes no progress, for example because the step in flight may never end."""
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
            await self._queue.close()

    async def _run_tasks(self) -> None:
        publishing = asyncio.create_task(self._publisher.run())
        background = [
            publishing,
            asyncio.create_task(self._claimer.run()),
            asyncio.create_task(self._maintenance.run()),
            asyncio.create_task(self._checkpointer.run()),
            asyncio.create_task(self._leases.run()),
            asyncio.create_task(self._peers.run()),
            *(asyncio.create_task(run()) for run in self._beside),
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
        self._claimer.close()
        self._driver.drain()

    def stop(self) -> None:
        """Make `run` return soon. Unfinished requests go back to the queue."""
        self._claimer.close()
        self._driver.stop()


async def _first_error_or(main: "asyncio.Task[None]", others: "Sequence[asyncio.Task[None]]") -> None:
    """Wait until `main` has ended, and raise its error if it has one. If another task fails first, raise that error."""
    while not main.done():
        done, _ = await asyncio.wait({main, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        others = [t for t in others if not t.done()]
    main.result()
