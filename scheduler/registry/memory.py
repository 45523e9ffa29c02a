"""The worker registry within one process, for the simulator and for tests of code that uses a registry."""

from dataclasses import dataclass

from scheduler.clock import Clock
from scheduler.registry.worker_status import Beat, WorkerStart, WorkerStatus
from scheduler.store import keys


@dataclass(frozen=True, slots=True)
class _Announcement:
    status: WorkerStatus
    sla_json: str
    expires_s: float


class MemoryWorkerRegistry:
    """A worker registry in memory. Implements `scheduler.registry.base.WorkerRegistry`."""

    def __init__(self, clock: Clock, ttl_s: float = keys.WORKER_TTL_S) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._announced: dict[str, _Announcement] = {}
        self._num_lost = 0
        self._starting: dict[str, tuple[float, WorkerStart]] = {}

    @property
    def num_unreadable(self) -> int:
        return 0

    async def announce(self, status: WorkerStatus, sla_json: str = "{}") -> str:
        before = self._alive().get(status.worker_id)
        expires_s = self._clock.now() + self._ttl_s
        self._announced[status.worker_id] = _Announcement(status, sla_json, expires_s)
        return "" if before is None else before.status.incarnation

    async def withdraw(self, worker_id: str) -> None:
        self._announced.pop(worker_id, None)

    async def remove_silent(self, worker_id: str) -> bool:
        was_there = self._announced.pop(worker_id, None) is not None
        self._num_lost += was_there
        return was_there

    async def num_lost(self) -> int:
        return self._num_lost

    async def announce_start(self, start: WorkerStart) -> None:
        self._starting[start.worker_id] = (self._clock.now() + keys.START_TTL_S, start)

    async def withdraw_start(self, worker_id: str) -> None:
        self._starting.pop(worker_id, None)

    async def starting(self) -> list[WorkerStart]:
        now = self._clock.now()
        return [start for _, (until_s, start) in sorted(self._starting.items()) if until_s > now]

    async def workers(self) -> list[WorkerStatus]:
        return [a.status for a in self._alive().values()]

    async def beats(self) -> dict[str, Beat]:
        return {worker_id: a.status.beat for worker_id, a in self._alive().items()}

    async def sla(self) -> dict[str, str]:
        return {worker_id: a.sla_json for worker_id, a in self._alive().items()}

    def _alive(self) -> dict[str, _Announcement]:
        now = self._clock.now()
        self._announced = {i: a for i, a in sorted(self._announced.items()) if a.expires_s > now}
        return self._announced
