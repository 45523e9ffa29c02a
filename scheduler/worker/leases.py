"""Keeps the leases of what a worker holds, and gives them back when the worker ends.

Also requeues what other workers held whose leases have ended. That happens only where no other worker has noticed the
end of their worker (`scheduler.worker.peers`), for example because none was running. Wall clocks may jump and differ,
so a lease counts as ended only if, besides, nobody has renewed it for some rounds.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from scheduler.clock import Clock
from scheduler.queue.base import LeaseStore
from scheduler.request import Lease
from scheduler.store.outage import StoreOutage
from scheduler.worker.heartbeat import WorkerIdentity

LEASE_S = 10.0
RENEW_S = 3.0  # seconds between two renewals; two renewals may fail before a lease ends
# Rounds of `RENEW_S` in which a lease that seems to be over must stay as it is. Whoever is alive renews it meanwhile,
# whatever the clocks say; one renewal may fail.
UNRENEWED_ROUNDS = 2


class LeaseHolder(Protocol):
    """What a worker holds under leases."""

    def leases(self) -> list[Lease]: ...

    def release(self, ids: Iterable[str]) -> None:
        """Drop what belongs to lost leases."""
        ...

    def release_all(self) -> list[Lease]:
        """Drop everything, and return its leases."""
        ...


class UnrenewedLeases:
    """Counts for how many rounds leases that seem to be over have not been renewed. Reads no clock."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, int], int] = {}  # by id and expiry

    def observe(self, expired: Mapping[str, int]) -> dict[str, int]:
        """Process the leases that seem to be over in this round. Return those that have ended."""
        self._rounds = {lease: self._rounds.get(lease, -1) + 1 for lease in expired.items()}
        return dict(lease for lease, rounds in self._rounds.items() if rounds >= UNRENEWED_ROUNDS)


class LeaseKeeper:
    def __init__(
        self, holder: LeaseHolder, queue: LeaseStore, outage: StoreOutage, clock: Clock, identity: WorkerIdentity
    ) -> None:
        self._holder = holder
        self._queue = queue
        self._outage = outage
        self._clock = clock
        self._identity = identity
        self._unrenewed = UnrenewedLeases()

    async def run(self) -> None:
        """Keep the leases until this task is cancelled.

        Each round renews the leases and requeues what has ended. An outage of the store begins the count of rounds
        anew: nobody could renew meanwhile.
        """
        while True:
            await self._clock.sleep(RENEW_S)
            is_renewed = await self._outage.attempt(self._renew())
            if is_renewed and not self._outage.lasts:
                await self._outage.attempt(self._requeue_ended())
            else:
                self._unrenewed = UnrenewedLeases()

    async def begin_anew(self, leases: Iterable[Lease]) -> None:
        """Put `leases`, and what dead processes with this worker's id have left, back into the queue.

        To be called when no other process with this id is alive.
        """
        await self._queue.release([*leases, *self._holder.release_all()])
        await self._queue.requeue_worker(self._identity.worker_id)

    async def give_back(self) -> None:
        """Put everything that is leased to this process back into the queue, also of an interrupted claim."""
        await self._queue.release(self._holder.release_all())
        await self._queue.requeue_worker(self._identity.holder)

    async def _requeue_ended(self) -> None:
        ended = self._unrenewed.observe(await self._queue.expired_leases(LEASE_S))
        await self._queue.requeue_expired(ended)

    async def _renew(self) -> None:
        """Renew all leases. Drop what belongs to the lost ones."""
        leases = self._holder.leases()
        kept = await self._queue.renew(leases, LEASE_S) if leases else []
        held = set(self._holder.leases())  # without the old leases of requests that were claimed again meanwhile
        lost = [lease for lease, is_kept in zip(leases, kept, strict=True) if not is_kept]
        self._holder.release([lease.request_id for lease in lost if lease in held])
