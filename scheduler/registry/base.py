"""The worker registry: live workers with their status and the state of their SLA controllers.

Workers announce themselves about every second. A worker that stops doing so is removed a few seconds later. Everyone
reads the beats twice a second, to notice who has gone silent. Gateways read the statuses once a second, for admission,
`/ready` and `/v1/models`.
"""

from collections.abc import Mapping
from typing import Protocol

from scheduler.registry.worker_status import Beat, WorkerStart, WorkerStatus


class WorkerRegistry(Protocol):
    @property
    def num_unreadable(self) -> int:
        """The number of workers whose status could not be read at the last read: another version's, or damaged.

        `workers` leaves them out.
        """
        ...

    async def announce(self, status: WorkerStatus, sla_json: str = "{}") -> str:
        """Announce that this worker is alive. Return the incarnation that did so before under its id; empty: none.

        `sla_json` is the state of the worker's SLA controller.
        """
        ...

    async def withdraw(self, worker_id: str) -> None:
        """Remove a worker. Unknown ids are ignored."""
        ...

    async def remove_silent(self, worker_id: str) -> bool:
        """Remove a worker whose heartbeats have stopped, and count it as lost, once for all who notice it.

        Return False if it is not there any more: it has withdrawn, or somebody else was first.
        """
        ...

    async def num_lost(self) -> int:
        """Return how many workers were lost since the store has had its data. It may fall after a failover."""
        ...

    async def announce_start(self, start: WorkerStart) -> None:
        """Announce what a worker does that does not serve yet. It is known for `START_TTL_S`."""
        ...

    async def withdraw_start(self, worker_id: str) -> None:
        """Remove what a worker does at its start: it has started, or it has failed."""
        ...

    async def starting(self) -> list[WorkerStart]:
        """Return what each worker does that starts at present, sorted by id."""
        ...

    async def workers(self) -> list[WorkerStatus]:
        """Return the status of every live worker, sorted by id."""
        ...

    async def beats(self) -> Mapping[str, Beat]:
        """Return the newest beat of every announced worker, by worker id: one small read.

        Dead workers may be among them, with a beat that does not change.
        """
        ...

    async def sla(self) -> dict[str, str]:
        """Return the last announced controller state of every live worker as a JSON text, by worker id."""
        ...
