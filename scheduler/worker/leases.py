"""Keeps the leases of the requests that a worker holds, and gives them back when the worker ends.

Also requeues requests whose leases have ended. That happens only where no other worker has noticed the end of their
worker (`scheduler.worker.peers`), for example because none was running.
"""

from collections.abc import Iterable

from scheduler.clock import Clock
from scheduler.planning.core import SchedulerCore
from scheduler.queue.base import Queue
from scheduler.request import Lease
from scheduler.worker.held_requests import HeldRequests
from scheduler.worker.refusals import Refusals

LEASE_S = 10.0
RENEW_S = 3.0  # seconds between two renewals; two renewals may fail before a lease ends


class LeaseKeeper:
    def __init__(
        self,
        core: SchedulerCore,
        queue: Queue,
        held: HeldRequests,
        refusals: Refusals,
        clock: Clock,
        worker_id: str,
    ) -> None:
        self._core = core
        self._queue = queue
        self._held = held
        self._refusals = refusals
        self._clock = clock
        self._worker_id = worker_id

    async def run(self) -> None:
        """Keep the leases until this task is cancelled.

        Each round renews the leases and requeues requests with expired leases. In the first round after a refusal of
        the store, nothing is requeued: other workers must renew their leases first.
        """
        others_could_renew = True
        while True:
            await self._clock.sleep(RENEW_S)
            is_renewed = await self._refusals.attempt(self._renew())
            if is_renewed and others_could_renew:
                await self._refusals.attempt(self._queue.requeue_expired())
            others_could_renew = not self._refusals.is_refused

    async def give_back(self, leases: Iterable[Lease] = ()) -> None:
        """Put all requests that are leased to this worker back into the queue, at their old places.

        There are three groups: the requests of `leases`; the requests that the core still holds; and the requests that
        were taken by an interrupted claim or by a dead process with the same worker id.
        """
        await self._queue.release([*leases, *self._core.release_all()])
        await self._queue.requeue_worker(self._worker_id)

    async def _renew(self) -> None:
        """Renew all leases. Remove the requests whose leases are lost."""
        leases = self._leases()
        kept = await self._queue.renew(leases, LEASE_S) if leases else []
        held = set(self._leases())  # without the old leases of requests that were claimed again meanwhile
        lost = [lease for lease, is_kept in zip(leases, kept, strict=True) if not is_kept]
        self._held.release([lease.request_id for lease in lost if lease in held])

    def _leases(self) -> list[Lease]:
        return [state.lease for state in self._core.states]
