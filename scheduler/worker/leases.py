"""Keeps the leases of the requests that a worker holds, and gives them back when the worker ends.

Also drops requests whose gateway is gone, and requeues requests whose worker is gone.
"""

from collections.abc import Iterable

from scheduler.clock import Clock
from scheduler.events.base import EventChannel
from scheduler.planning.core import SchedulerCore
from scheduler.queue.base import Queue
from scheduler.request import Lease
from scheduler.worker.held_requests import HeldRequests

LEASE_S = 10.0
RENEW_S = 3.0  # seconds between two renewals; two renewals may fail before a lease ends


class LeaseKeeper:
    def __init__(
        self,
        core: SchedulerCore,
        queue: Queue,
        events: EventChannel,
        held: HeldRequests,
        clock: Clock,
        worker_id: str,
    ) -> None:
        self._core = core
        self._queue = queue
        self._events = events
        self._held = held
        self._clock = clock
        self._worker_id = worker_id

    async def run(self) -> None:
        """Keep the leases until this task is cancelled.

        Each round renews the leases, drops requests of missing gateways and requeues requests with expired leases.
        """
        while True:
            await self._clock.sleep(RENEW_S)
            await self._renew()
            await self._drop_orphans()
            await self._queue.requeue_expired()

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

    async def _drop_orphans(self) -> None:
        """Drop the requests of gateways that are gone.

        The publisher notices a missing gateway only when it sends an event. So a request that sends its only event at
        its end would be computed for nothing.
        """
        by_gateway: dict[str, list[str]] = {}
        for state in self._core.states:
            by_gateway.setdefault(state.request.reply_to, []).append(state.id)
        for reply_to, request_ids in by_gateway.items():
            if not await self._events.publish(reply_to, ()):
                await self._queue.cancel(request_ids)
                self._held.drop(request_ids)
