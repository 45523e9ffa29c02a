"""The workers that are alive, as a gateway sees them: read regularly, and when a request finds none.

Knows the registry and heartbeats; does not know requests.
"""

from collections.abc import Mapping
from contextlib import suppress

import structlog

from scheduler.clock import Clock
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.heartbeat_monitor import CHECK_S, WORKER_SILENT_S, HeartbeatMonitor
from scheduler.registry.worker_status import WorkerStart, WorkerStatus
from scheduler.store.errors import StoreRefused

log = structlog.get_logger()

# Bulk requests and tasks are still accepted for this many seconds after the last worker was seen, because it may be
# restarting.
WORKER_GRACE_S = 20.0
START_GAP_S = 2.0  # longest time from the end of a start's reports to the worker's first heartbeat


class LiveWorkers:
    def __init__(self, registry: WorkerRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._monitor = HeartbeatMonitor(WORKER_SILENT_S)
        self._listed: list[WorkerStatus] = []  # the newest statuses, also of workers that have died since
        self.engines: list[WorkerStatus] = []  # workers with an engine
        self.endpoints: list[WorkerStatus] = []  # workers with a static endpoint, which serve tasks
        self.starting: list[WorkerStart] = []  # workers that start
        self._start_seen_s: float | None = None
        self._engine_seen_s: float | None = None
        self._endpoint_seen_s: float | None = None
        self._num_reads_without = 0  # reads in a row that found no worker with an engine

    async def read(self) -> None:
        """Read the beats, and the statuses if a worker is new. To be called once each `CHECK_S` seconds."""
        beats = {worker_id: beat.at_ms for worker_id, beat in (await self._registry.beats()).items()}
        for worker_id in self._monitor.observe(beats):
            with suppress(StoreRefused):
                if await self._registry.remove_silent(worker_id):  # it announces itself again if it wakes up
                    log.warning("a worker is silent", worker=worker_id)
        if not beats.keys() <= {w.worker_id for w in self._listed}:
            self._listed = await self._registry.workers()
        self._note(beats)
        if not self.engines:
            await self._note_starts()
        self._num_reads_without = 0 if self.engines else self._num_reads_without + 1

    async def look(self) -> None:
        """Read the workers now, because one may have come since the last regular read.

        For callers who would otherwise say that there is none. Does not count as a read for the monitor.
        """
        self._listed = await self._registry.workers()
        self._note({w.worker_id: w.at_ms for w in self._listed})
        if not self.engines:
            await self._note_starts()

    async def reporting(self) -> list[WorkerStatus]:
        """Read the statuses, and who starts.

        Return the statuses of the workers with an engine that were not silent at the last read.
        """
        self._listed = await self._registry.workers()
        await self._note_starts()
        return [w for w in self._listed if not (w.batch_items or self._monitor.is_silent(w.worker_id))]

    def _note(self, beats: Mapping[str, int]) -> None:
        """Note who of the listed workers is alive: those whose newest beats these are."""
        known = [w for w in self._listed if w.worker_id in beats]
        alive = [w for w in known if self._monitor.is_alive(w.worker_id, beats[w.worker_id])]
        self.engines = [w for w in alive if not w.batch_items]
        self.endpoints = [w for w in alive if w.batch_items]
        if self.endpoints:
            self._endpoint_seen_s = self._clock.now()
        if self.engines:
            self._engine_seen_s = self._clock.now()

    async def _note_starts(self) -> None:
        self.starting = await self._registry.starting()
        if self.starting:
            self._start_seen_s = self._clock.now()

    @property
    def is_starting(self) -> bool:
        """Whether a worker starts, or has ended its start and is about to serve."""
        return self._is_recent(self._start_seen_s, START_GAP_S)

    @property
    def num_unreadable(self) -> int:
        """The number of workers whose heartbeats cannot be read, as those of another version."""
        return self._registry.num_unreadable

    @property
    def has_engine(self) -> bool:
        """Whether a worker with an engine is alive, or was so lately and may be restarting."""
        return bool(self.engines) or self._is_recent(self._engine_seen_s)

    @property
    def has_endpoint(self) -> bool:
        """Whether a worker for tasks is alive, or was so lately and may be restarting."""
        return bool(self.endpoints) or self._is_recent(self._endpoint_seen_s)

    def _is_recent(self, seen_s: float | None, grace_s: float = WORKER_GRACE_S) -> bool:
        return seen_s is not None and self._clock.now() - seen_s < grace_s

    def were_away(self, seconds: float) -> bool:
        """Return whether no worker with an engine has been alive for so long.

        Reads are counted, not seconds, so that an outage of the store does not count.
        """
        return self._num_reads_without >= seconds / CHECK_S
